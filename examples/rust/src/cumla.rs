//! Bindings of cumla.h and of the operations of a decode step, as in cumla_operations.h of the same version of cumla.
use crate::cuda::{Buffer, Stream};
use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::marker::PhantomData;

/// An optional integer that is not given, and an optional number.
pub const NONE: i64 = i64::MIN;
pub const NO_NUMBER: f64 = -0.0;
/// Formats of caches.
pub const DSV4_FP8: i64 = 0;
pub const INDEXER_FP8: i64 = 2;

/// Types of elements: the code of cumla_type, and the bytes.
#[derive(Clone, Copy)]
pub struct Type(i64, i64);
pub const UINT8: Type = Type(1, 1);
pub const BOOL: Type = Type(3, 1);
pub const INT32: Type = Type(4, 4);
pub const INT64: Type = Type(5, 8);
pub const BFLOAT16: Type = Type(7, 2);
pub const FLOAT32: Type = Type(8, 4);

/// An array in a buffer, which lives longer. The default is no array.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Array<'a> {
    data: u64,
    kind: i64,
    axes: i64,
    shape: [i64; 4],
    strides: [i64; 4],
    buffer: PhantomData<&'a Buffer>,
}

impl<'a> Array<'a> {
    /// An array without gaps at the buffer's start.
    pub fn packed(buffer: &'a Buffer, kind: Type, shape: &[i64]) -> Self {
        let mut strides = vec![kind.1; shape.len()];
        for axis in (1..shape.len()).rev() {
            strides[axis - 1] = strides[axis] * shape[axis];
        }
        Self::strided(buffer, kind, shape, &strides)
    }

    /// An array with strides in bytes. Panics if it is not within the buffer.
    pub fn strided(buffer: &'a Buffer, kind: Type, shape: &[i64], strides: &[i64]) -> Self {
        assert!(shape.len() == strides.len() && shape.len() <= 4, "an array has up to four axes");
        assert!(shape.iter().all(|&size| size > 0) && strides.iter().all(|&stride| stride >= 0));
        let last: i64 = shape.iter().zip(strides).map(|(size, stride)| (size - 1) * stride).sum();
        assert!(last + kind.1 <= buffer.bytes() as i64, "an array ends behind its buffer");
        let mut array = Self { data: buffer.address(), kind: kind.0, axes: shape.len() as i64, ..Self::default() };
        array.shape[..shape.len()].copy_from_slice(shape);
        array.strides[..shape.len()].copy_from_slice(strides);
        array
    }
}

/// The struct of an operation.
///
/// # Safety
/// It has the fields of the struct that OPERATION has in cumla_operations.h.
pub unsafe trait Arguments {
    const OPERATION: u32;
}

macro_rules! operation {
    ($name:ident, $number:literal, { $($array:ident),* }, { $($field:ident: $kind:ty),* }) => {
        #[repr(C)]
        #[derive(Clone, Copy, Default)]
        pub struct $name<'a> { $(pub $array: Array<'a>,)* $(pub $field: $kind,)* }
        unsafe impl Arguments for $name<'_> { const OPERATION: u32 = $number; }
    };
}

operation!(QuantizeAndInsertKCache, 0,
    { k, k_cache, slot_mapping }, { block_size: i64, is_ue8m0: i64, layout: i64, min_exponent: i64 });
operation!(QnormRopeAndInsert, 5,
    { q, kv, k_cache, slot_mapping, positions, cos_sin_cache, out }, { eps: f64, block_size: i64, layout: i64 });
operation!(ApplyRope, 8,
    { x, positions, cos_sin_cache, ssmax_scale, ssmax_bias, out }, { inverse: i64, rope_first: i64, is_neox: i64 });
operation!(ComputeSwaIndicesAndLens, 19,
    { query_start_loc, seq_lens, token_to_req_indices, is_valid_token, block_table, swa_indices, swa_lens },
    { block_size: i64, window_size: i64, num_tokens: i64, token_offset: i64 });
operation!(FusedIndexerQRopeQuant, 23,
    { positions, index_q, index_q_cos_sin_cache, index_weights, ssmax_scale, ssmax_bias, q_values, q_weights },
    { index_weights_softmax_scale: f64, index_weights_head_scale: f64, rope_first: i64, is_neox: i64, quantize: i64,
      q_format: i64, hadamard: i64 });
operation!(IndexerTopk, 28,
    { q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, kv_scales, context_lens, block_table, schedule_metadata, slots,
      slot_lens, is_valid_token, slot_block_table, positions, candidate_blocks, out, workspace },
    { topk: i64, max_seqlen_k: i64, max_context_len: i64, layout: i64, slot_block_size: i64, pool: i64,
      candidate_block_size: i64 });
operation!(SparseMlaDecode, 33,
    { q, k_cache, indices, topk_length, extra_k_cache, extra_indices, extra_topk_length, attn_sink, out, lse, workspace },
    { layout: i64, block_size: i64, extra_block_size: i64, extra_layout: i64, softmax_scale: f64, batch_invariant: i64,
      planned: i64 });

/// What cumla_message says of a call that failed.
#[derive(Debug)]
pub struct Error(pub String);

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

#[link(name = "cumla", kind = "static")]
extern "C" {
    fn cumla_open(path: *const c_char, device: c_int, library: *mut *mut c_void) -> c_int;
    fn cumla_close(library: *mut c_void);
    fn cumla_message() -> *const c_char;
    fn cumla_call(
        library: *const c_void,
        operation: u32,
        arguments: *const c_void,
        bytes: usize,
        stream: *mut c_void,
        flags: u32,
    ) -> c_int;
    fn cumla_workspace(
        library: *const c_void,
        operation: u32,
        arguments: *const c_void,
        bytes: usize,
        needed: *mut u64,
    ) -> c_int;
}

fn checked(status: c_int) -> Result<(), Error> {
    match status {
        0 => Ok(()),
        _ => Err(Error(unsafe { CStr::from_ptr(cumla_message()) }.to_string_lossy().into_owned())),
    }
}

/// A file of cumla export, opened for a device. Any number of threads may make calls.
pub struct Library(*mut c_void);
unsafe impl Send for Library {}
unsafe impl Sync for Library {}

impl Library {
    /// Loads all kernels. The device's primary context is current in this thread afterwards.
    pub fn open(path: &str, device: i32) -> Result<Self, Error> {
        let path = CString::new(path).map_err(|_| Error("path: has a zero byte".into()))?;
        let mut library = std::ptr::null_mut();
        checked(unsafe { cumla_open(path.as_ptr(), device, &mut library) })?;
        Ok(Self(library))
    }

    /// Makes a call on a stream: nothing is allocated, nothing waits. The buffers must live until the stream is
    /// synchronised; a captured graph borrows them.
    pub fn call<T: Arguments>(&self, arguments: &T, stream: &Stream) -> Result<(), Error> {
        let (address, bytes) = ((arguments as *const T).cast(), size_of::<T>());
        checked(unsafe { cumla_call(self.0, T::OPERATION, address, bytes, stream.raw(), 0) })
    }

    /// Bytes of the workspace that a call needs. The workspace of the arguments may be smaller.
    pub fn workspace<T: Arguments>(&self, arguments: &T) -> Result<u64, Error> {
        let (address, mut bytes) = ((arguments as *const T).cast(), 0);
        checked(unsafe { cumla_workspace(self.0, T::OPERATION, address, size_of::<T>(), &mut bytes) })?;
        Ok(bytes)
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        unsafe { cumla_close(self.0) }
    }
}
