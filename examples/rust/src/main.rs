//! A decode step of two C4A layers of DeepSeek V4 in a CUDA graph, as examples/c/decode_step.c.
//!
//! decode_step FILE [REQUESTS [STEPS]]
mod cuda;
mod cumla;

use cuda::{Buffer, Stream};
use cumla::*;

const MOST: i64 = 64;
const HEADS: i64 = 64;
const DIM: i64 = 512;
const ROPE: i64 = 64;
const INDEX_HEADS: i64 = 64;
const INDEX_DIM: i64 = 128;
const WINDOW: i64 = 128;
const TOPK: i64 = 512;
const RATIO: i64 = 4;
const LAYERS: usize = 2;
const CONTEXT: i64 = 2048;
// A cache of DSV4_FP8: docs/layouts.md
const BLOCK: i64 = 64;
const ROW_BYTES: i64 = 584;
const PAGE_BYTES: i64 = 37440;
const COLUMNS: i64 = CONTEXT / BLOCK;
// A cache of INDEXER_FP8
const KEY_BYTES: i64 = 132;
const KEY_PAGE_BYTES: i64 = 8640;
// Of a selection's table: a power of two. The context needs COLUMNS / RATIO of them.
const COMPRESSED_COLUMNS: i64 = 16;

/// Arrays of the device. Those that the host writes before a step come first.
struct Memory {
    n: i64,
    lengths: Buffer,
    positions: Buffer,
    slots: Buffer,
    compressed_slots: Buffer,
    seen: Buffer,
    starts: Buffer,
    requests: Buffer,
    valid: Buffer,
    pages: Buffer,
    compressed_pages: Buffer,
    rotation: Buffer,
    sink: Buffer,
    q: Buffer,
    kv: Buffer,
    rotated: Buffer,
    out: Buffer,
    lse: Buffer,
    swa_indices: Buffer,
    swa_lens: Buffer,
    topk_slots: Buffer,
    topk_lens: Buffer,
    row: Buffer,
    key: Buffer,
    index_q: Buffer,
    index_weights: Buffer,
    index_values: Buffer,
    index_factors: Buffer,
    selected: Buffer,
    caches: Vec<Buffer>,
    compressed: Vec<Buffer>,
    keys: Vec<Buffer>,
    workspace: Buffer,
    scores: Buffer,
}

fn cache(buffer: &Buffer, pages: i64) -> Array<'_> {
    Array::strided(buffer, UINT8, &[pages, BLOCK, ROW_BYTES], &[PAGE_BYTES, ROW_BYTES, 1])
}

fn key_cache(buffer: &Buffer, pages: i64) -> Array<'_> {
    Array::strided(buffer, UINT8, &[pages, BLOCK, KEY_BYTES], &[KEY_PAGE_BYTES, KEY_BYTES, 1])
}

impl Memory {
    fn new(library: &Library, n: i64, stream: &Stream) -> Result<Self, Error> {
        let zeros = |count: i64, bytes: i64| Buffer::zeros((count * bytes) as usize, stream);
        let caches = |pages: i64, bytes: i64| (0..LAYERS).map(|_| zeros(n * pages, bytes)).collect::<Vec<_>>();
        let integers = |end: i64| (0..end as i32).collect::<Vec<_>>();
        let mut memory = Self {
            n,
            lengths: zeros(n, 4),
            positions: zeros(n, 8),
            slots: zeros(n, 8),
            compressed_slots: zeros(n, 8),
            seen: zeros(n, 4),
            starts: Buffer::of(&integers(n + 1), stream),
            requests: Buffer::of(&integers(n), stream),
            valid: Buffer::of(&vec![1u8; n as usize], stream),
            pages: Buffer::of(&integers(n * COLUMNS), stream),
            compressed_pages: Buffer::of(&integers(n * COMPRESSED_COLUMNS), stream),
            rotation: Buffer::of(&rotation(), stream),
            sink: zeros(HEADS, 4),
            q: Buffer::of(&random_rows(n * HEADS * DIM), stream),
            kv: Buffer::of(&random_rows(n * DIM), stream),
            rotated: zeros(n * HEADS * DIM, 2),
            out: zeros(n * HEADS * DIM, 2),
            lse: zeros(n * HEADS, 4),
            swa_indices: zeros(n * WINDOW, 4),
            swa_lens: zeros(n, 4),
            topk_slots: zeros(n * TOPK, 4),
            topk_lens: zeros(n, 4),
            row: Buffer::of(&random_rows(n * DIM), stream),
            key: Buffer::of(&random_rows(n * INDEX_DIM), stream),
            index_q: Buffer::of(&random_rows(n * INDEX_HEADS * INDEX_DIM), stream),
            index_weights: Buffer::of(&vec![1f32 / 64.0; (n * INDEX_HEADS) as usize], stream),
            index_values: zeros(n * INDEX_HEADS * INDEX_DIM, 1),
            index_factors: zeros(n * INDEX_HEADS, 4),
            selected: zeros(n * TOPK, 4),
            caches: caches(COLUMNS, PAGE_BYTES),
            compressed: caches(COMPRESSED_COLUMNS, PAGE_BYTES),
            keys: caches(COMPRESSED_COLUMNS, KEY_PAGE_BYTES),
            workspace: zeros(1, 16),
            scores: zeros(1, 16),
        };
        let bytes = library.workspace(&memory.decode(0))?;
        memory.workspace = zeros(bytes as i64, 1);
        let bytes = library.workspace(&memory.selection(0))?;
        memory.scores = zeros(bytes as i64, 1);
        Ok(memory)
    }

    fn rows<'a>(&self, buffer: &'a Buffer) -> Array<'a> {
        Array::packed(buffer, BFLOAT16, &[self.n, HEADS, DIM])
    }

    fn windows(&self) -> ComputeSwaIndicesAndLens<'_> {
        ComputeSwaIndicesAndLens {
            query_start_loc: Array::packed(&self.starts, INT32, &[self.n + 1]),
            seq_lens: Array::packed(&self.lengths, INT32, &[self.n]),
            token_to_req_indices: Array::packed(&self.requests, INT32, &[self.n]),
            is_valid_token: Array::packed(&self.valid, BOOL, &[self.n]),
            block_table: Array::packed(&self.pages, INT32, &[self.n, COLUMNS]),
            swa_indices: Array::packed(&self.swa_indices, INT32, &[self.n, WINDOW]),
            swa_lens: Array::packed(&self.swa_lens, INT32, &[self.n]),
            block_size: BLOCK,
            window_size: WINDOW,
            num_tokens: self.n,
            token_offset: 0,
        }
    }

    /// The rows whose keys score highest, as slots of the compressed cache; keys and rows have the same pages.
    fn selection(&self, layer: usize) -> IndexerTopk<'_> {
        let n = self.n;
        IndexerTopk {
            q: Array::packed(&self.index_values, UINT8, &[n, 1, INDEX_HEADS, INDEX_DIM]),
            kv: key_cache(&self.keys[layer], n * COMPRESSED_COLUMNS),
            weights: Array::packed(&self.index_factors, FLOAT32, &[n, INDEX_HEADS]),
            context_lens: Array::packed(&self.seen, INT32, &[n]),
            block_table: Array::packed(&self.compressed_pages, INT32, &[n, COMPRESSED_COLUMNS]),
            is_valid_token: Array::packed(&self.valid, BOOL, &[n]),
            slots: Array::packed(&self.topk_slots, INT32, &[n, TOPK]),
            slot_lens: Array::packed(&self.topk_lens, INT32, &[n]),
            out: Array::packed(&self.selected, INT32, &[n, TOPK]),
            workspace: Array::packed(&self.scores, UINT8, &[self.scores.bytes() as i64]),
            topk: TOPK,
            max_context_len: NONE,
            layout: INDEXER_FP8,
            slot_block_size: NONE,
            pool: 1,
            candidate_block_size: 8,
            ..Default::default()
        }
    }

    /// The compressed row that a token completes: a result of the compressor.
    fn insert_compressed(&self, layer: usize) -> QuantizeAndInsertKCache<'_> {
        QuantizeAndInsertKCache {
            k: Array::packed(&self.row, BFLOAT16, &[self.n, DIM]),
            k_cache: cache(&self.compressed[layer], self.n * COMPRESSED_COLUMNS),
            slot_mapping: Array::packed(&self.compressed_slots, INT64, &[self.n]),
            block_size: BLOCK,
            is_ue8m0: 1,
            layout: DSV4_FP8,
            min_exponent: NONE,
        }
    }

    /// The index key of that row.
    fn insert_key(&self, layer: usize) -> QuantizeAndInsertKCache<'_> {
        QuantizeAndInsertKCache {
            k: Array::packed(&self.key, BFLOAT16, &[self.n, INDEX_DIM]),
            k_cache: key_cache(&self.keys[layer], self.n * COMPRESSED_COLUMNS),
            layout: INDEXER_FP8,
            ..self.insert_compressed(layer)
        }
    }

    fn queries(&self) -> FusedIndexerQRopeQuant<'_> {
        FusedIndexerQRopeQuant {
            positions: Array::packed(&self.positions, INT64, &[self.n]),
            index_q: Array::packed(&self.index_q, BFLOAT16, &[self.n, INDEX_HEADS, INDEX_DIM]),
            index_q_cos_sin_cache: Array::packed(&self.rotation, FLOAT32, &[CONTEXT, ROPE]),
            index_weights: Array::packed(&self.index_weights, FLOAT32, &[self.n, INDEX_HEADS]),
            q_values: Array::packed(&self.index_values, UINT8, &[self.n, INDEX_HEADS, INDEX_DIM]),
            q_weights: Array::packed(&self.index_factors, FLOAT32, &[self.n, INDEX_HEADS]),
            index_weights_softmax_scale: NO_NUMBER,
            index_weights_head_scale: NO_NUMBER,
            quantize: 1,
            ..Default::default()
        }
    }

    fn insert(&self, layer: usize) -> QnormRopeAndInsert<'_> {
        QnormRopeAndInsert {
            q: self.rows(&self.q),
            kv: Array::packed(&self.kv, BFLOAT16, &[self.n, DIM]),
            k_cache: cache(&self.caches[layer], self.n * COLUMNS),
            slot_mapping: Array::packed(&self.slots, INT64, &[self.n]),
            positions: Array::packed(&self.positions, INT64, &[self.n]),
            cos_sin_cache: Array::packed(&self.rotation, FLOAT32, &[CONTEXT, ROPE]),
            out: self.rows(&self.rotated),
            eps: 1e-6,
            block_size: BLOCK,
            layout: DSV4_FP8,
        }
    }

    fn decode(&self, layer: usize) -> SparseMlaDecode<'_> {
        let n = self.n;
        SparseMlaDecode {
            q: Array::packed(&self.rotated, BFLOAT16, &[n, 1, HEADS, DIM]),
            k_cache: cache(&self.caches[layer], n * COLUMNS),
            indices: Array::packed(&self.swa_indices, INT32, &[n, 1, WINDOW]),
            topk_length: Array::packed(&self.swa_lens, INT32, &[n]),
            extra_k_cache: cache(&self.compressed[layer], n * COMPRESSED_COLUMNS),
            extra_indices: Array::packed(&self.topk_slots, INT32, &[n, 1, TOPK]),
            extra_topk_length: Array::packed(&self.topk_lens, INT32, &[n, 1]),
            attn_sink: Array::packed(&self.sink, FLOAT32, &[HEADS]),
            out: Array::packed(&self.out, BFLOAT16, &[n, 1, HEADS, DIM]),
            lse: Array::packed(&self.lse, FLOAT32, &[n, HEADS, 1]),
            workspace: Array::packed(&self.workspace, UINT8, &[self.workspace.bytes() as i64]),
            layout: DSV4_FP8,
            block_size: NONE,
            extra_block_size: NONE,
            extra_layout: DSV4_FP8,
            softmax_scale: (DIM as f64).powf(-0.5),
            batch_invariant: 0,
            planned: if layer == 0 { 0 } else { 1 }, // the first layer's call divides the work of the step
        }
    }

    fn rotate_back(&self) -> ApplyRope<'_> {
        ApplyRope {
            x: self.rows(&self.out),
            out: self.rows(&self.out),
            positions: Array::packed(&self.positions, INT64, &[self.n]),
            cos_sin_cache: Array::packed(&self.rotation, FLOAT32, &[CONTEXT, ROPE]),
            inverse: 1,
            ..Default::default()
        }
    }

    fn step(&self, library: &Library, stream: &Stream) -> Result<(), Error> {
        library.call(&self.windows(), stream)?;
        for layer in 0..LAYERS {
            library.call(&self.insert(layer), stream)?;
            library.call(&self.insert_compressed(layer), stream)?;
            library.call(&self.insert_key(layer), stream)?;
            library.call(&self.queries(), stream)?;
            library.call(&self.selection(layer), stream)?;
            library.call(&self.decode(layer), stream)?;
            library.call(&self.rotate_back(), stream)?;
        }
        Ok(())
    }

    /// Writes what a step reads; returns the lengths. Every request has one token more than in the step before.
    fn prepare(&self, number: i64, stream: &Stream) -> Vec<i32> {
        let lengths: Vec<i64> = (0..self.n).map(|r| 1 + (37 + 61 * r) % (CONTEXT / 2) + number).collect();
        let positions: Vec<i64> = lengths.iter().map(|length| length - 1).collect();
        let slots: Vec<i64> = positions.iter().zip(0..).map(|(position, r)| r * COLUMNS * BLOCK + position).collect();
        let seen: Vec<i32> = lengths.iter().map(|length| (length / RATIO) as i32).collect();
        // The row of a token that completes it, else none; a request's pages are in order.
        let row = |(length, r): (&i64, i64)| match length % RATIO {
            0 => r * COMPRESSED_COLUMNS * BLOCK + length / RATIO - 1,
            _ => -1,
        };
        let compressed_slots: Vec<i64> = lengths.iter().zip(0..).map(row).collect();
        let lengths: Vec<i32> = lengths.iter().map(|&length| length as i32).collect();
        self.lengths.write(&lengths, stream);
        self.positions.write(&positions, stream);
        self.slots.write(&slots, stream);
        self.seen.write(&seen, stream);
        self.compressed_slots.write(&compressed_slots, stream);
        lengths
    }
}

/// Cosines and sines of RoPE at every position.
fn rotation() -> Vec<f32> {
    let angle = |position: i64, i: i64| position as f64 * 10000f64.powf(-2.0 * i as f64 / ROPE as f64);
    let half = ROPE / 2;
    let row = |p: i64| (0..half).map(move |i| angle(p, i).cos()).chain((0..half).map(move |i| angle(p, i).sin()));
    (0..CONTEXT).flat_map(row).map(|x| x as f32).collect()
}

/// bfloat16 from -1 to 1.
fn random_rows(count: i64) -> Vec<u16> {
    let mut state = 88172645463325252u64;
    let mut number = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| (number().to_bits() >> 16) as u16).collect()
}

fn run(path: &str, n: i64, steps: i64) -> Result<(), Error> {
    let library = Library::open(path, 0)?;
    let stream = Stream::new();
    let memory = Memory::new(&library, n, &stream)?;
    let graph = stream.capture(&memory, |memory| memory.step(&library, &stream))?;
    for number in 0..steps {
        let lengths = memory.prepare(number, &stream);
        graph.launch(&stream);
        let lse = memory.lse.read((n * HEADS) as usize, &stream);
        let (first, last) = (lengths[0], lengths[lengths.len() - 1]);
        print!("step {number}: {n} requests, lengths {first} to {last}");
        println!(", lse of the last {:.4}", lse[((n - 1) * HEADS) as usize]);
    }
    Ok(())
}

fn main() {
    let words: Vec<String> = std::env::args().collect();
    let number = |i: usize, usual: i64| words.get(i).map_or(Some(usual), |word| word.parse().ok()).unwrap_or(0);
    let (n, steps) = (number(2, MOST), number(3, 8));
    if words.len() < 2 || !(1..=MOST).contains(&n) || !(1..=CONTEXT / 2).contains(&steps) {
        eprintln!("usage: decode_step FILE [REQUESTS, to {MOST} [STEPS, to {}]]", CONTEXT / 2);
        std::process::exit(2);
    }
    if let Err(error) = run(&words[1], n, steps) {
        eprintln!("{error}");
        std::process::exit(1);
    }
}
