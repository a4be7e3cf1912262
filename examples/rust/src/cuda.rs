//! Memory, streams and graphs of the driver. An error of the driver is a panic: an engine has its own handling.
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::marker::PhantomData;

#[link(name = "cuda")]
extern "C" {
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> c_int;
    fn cuMemFree_v2(address: u64) -> c_int;
    fn cuMemsetD8Async(address: u64, value: u8, bytes: usize, stream: *mut c_void) -> c_int;
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: *mut c_void) -> c_int;
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: *mut c_void) -> c_int;
    fn cuStreamCreate(stream: *mut *mut c_void, flags: c_uint) -> c_int;
    fn cuStreamSynchronize(stream: *mut c_void) -> c_int;
    fn cuStreamDestroy_v2(stream: *mut c_void) -> c_int;
    fn cuStreamBeginCapture_v2(stream: *mut c_void, mode: c_int) -> c_int;
    fn cuStreamEndCapture(stream: *mut c_void, graph: *mut *mut c_void) -> c_int;
    fn cuGraphInstantiateWithFlags(executable: *mut *mut c_void, graph: *mut c_void, flags: c_ulonglong) -> c_int;
    fn cuGraphLaunch(executable: *mut c_void, stream: *mut c_void) -> c_int;
    fn cuGraphExecDestroy(executable: *mut c_void) -> c_int;
    fn cuGraphDestroy(graph: *mut c_void) -> c_int;
}

fn check(error: c_int) {
    assert!(error == 0, "the driver returned {error}");
}

/// A stream of the current context.
pub struct Stream(*mut c_void);

impl Stream {
    pub fn new() -> Self {
        let mut stream = std::ptr::null_mut();
        check(unsafe { cuStreamCreate(&mut stream, 1) }); // CU_STREAM_NON_BLOCKING
        Self(stream)
    }

    pub fn raw(&self) -> *mut c_void {
        self.0
    }

    pub fn synchronize(&self) {
        check(unsafe { cuStreamSynchronize(self.0) });
    }

    /// A graph of the calls of a function, which read and write `memory`.
    pub fn capture<'a, T, E>(&self, memory: &'a T, calls: impl FnOnce(&'a T) -> Result<(), E>) -> Result<Graph<'a>, E> {
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        check(unsafe { cuStreamBeginCapture_v2(self.0, 0) }); // CU_STREAM_CAPTURE_MODE_GLOBAL
        let made = calls(memory);
        check(unsafe { cuStreamEndCapture(self.0, &mut graph) });
        if made.is_ok() {
            check(unsafe { cuGraphInstantiateWithFlags(&mut executable, graph, 0) });
        }
        check(unsafe { cuGraphDestroy(graph) });
        made.map(|()| Graph(executable, PhantomData))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        unsafe {
            cuStreamSynchronize(self.0);
            cuStreamDestroy_v2(self.0);
        }
    }
}

/// A captured graph; it borrows the memory that it reads and writes.
pub struct Graph<'a>(*mut c_void, PhantomData<&'a ()>);

impl Graph<'_> {
    pub fn launch(&self, stream: &Stream) {
        check(unsafe { cuGraphLaunch(self.0, stream.0) });
    }
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        unsafe { cuGraphExecDestroy(self.0) };
    }
}

/// Memory of the device.
pub struct Buffer {
    address: u64,
    bytes: usize,
}

impl Buffer {
    /// Zeros.
    pub fn zeros(bytes: usize, stream: &Stream) -> Self {
        let mut address = 0;
        check(unsafe { cuMemAlloc_v2(&mut address, bytes) });
        check(unsafe { cuMemsetD8Async(address, 0, bytes, stream.0) });
        Self { address, bytes }
    }

    /// Copies of numbers.
    pub fn of<T: Copy>(values: &[T], stream: &Stream) -> Self {
        let buffer = Self::zeros(size_of_val(values), stream);
        buffer.write(values, stream);
        buffer
    }

    /// Writes numbers at the start, after the work that the stream has.
    pub fn write<T: Copy>(&self, values: &[T], stream: &Stream) {
        let bytes = size_of_val(values);
        assert!(bytes <= self.bytes, "{bytes} bytes for a buffer of {}", self.bytes);
        check(unsafe { cuMemcpyHtoDAsync_v2(self.address, values.as_ptr().cast(), bytes, stream.0) });
        stream.synchronize(); // before the values may change
    }

    /// The first float32 numbers, after the work that the stream has.
    pub fn read(&self, count: usize, stream: &Stream) -> Vec<f32> {
        let mut values = vec![0f32; count];
        let bytes = size_of_val(values.as_slice());
        assert!(bytes <= self.bytes, "{bytes} bytes of a buffer of {}", self.bytes);
        check(unsafe { cuMemcpyDtoHAsync_v2(values.as_mut_ptr().cast(), self.address, bytes, stream.0) });
        stream.synchronize();
        values
    }

    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        unsafe { cuMemFree_v2(self.address) };
    }
}
