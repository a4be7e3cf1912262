"""Code written for FlashMLA: only the import changes. On CPU or GPU."""

import torch

import cumla.interop.flash_mla as flash_mla  # was: import flash_mla

BATCH, S_Q, HEADS, BLOCKS, BLOCK_SIZE, TOPK = 2, 2, 128, 8, 64, 128


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    q = torch.randn(BATCH, S_Q, HEADS, 576, dtype=torch.bfloat16, device=device)
    indices = torch.randint(BLOCKS * BLOCK_SIZE, (BATCH, S_Q, TOPK), dtype=torch.int32, device=device)

    # FP8 cache of DeepSeek V3.2: 656 bytes a token; bytes 512 to 528 are four float32 scales.
    k_cache = torch.zeros(BLOCKS, BLOCK_SIZE, 1, 656, dtype=torch.uint8, device=device)
    k_cache[..., :512] = (
        torch.randn(BLOCKS, BLOCK_SIZE, 1, 512, device=device).to(torch.float8_e4m3fn).view(torch.uint8)
    )
    k_cache[..., 512:528] = torch.ones(4, device=device).view(torch.uint8)

    tile_scheduler_metadata, _ = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, k_cache, None, None, 512, tile_scheduler_metadata, is_fp8_kvcache=True, indices=indices
    )
    print(f"sparse: out {out.dtype} {tuple(out.shape)}, lse {tuple(lse.shape)} on {device}")

    kv_cache = torch.randn(BLOCKS, BLOCK_SIZE, 1, 576, dtype=torch.bfloat16, device=device)
    block_table = torch.arange(BLOCKS, dtype=torch.int32, device=device).view(BATCH, -1)
    cache_seqlens = torch.tensor([100, 256], dtype=torch.int32, device=device)
    tile_scheduler_metadata, _ = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, kv_cache, block_table, cache_seqlens, 512, tile_scheduler_metadata, causal=True
    )
    print(f"dense:  out {out.dtype} {tuple(out.shape)}, lse {tuple(lse.shape)} on {device}")

    # Prefill: every token of a prompt attends to the rows selected for it.
    rows, prompt = kv_cache.view(-1, 1, 576), q.view(BATCH * S_Q, HEADS, 576)
    chosen = indices.view(BATCH * S_Q, 1, TOPK)
    out, _, lse = flash_mla.flash_mla_sparse_fwd(prompt, rows, chosen, 576**-0.5)
    print(f"prefill: out {out.dtype} {tuple(out.shape)}, lse {tuple(lse.shape)} on {device}")


if __name__ == "__main__":
    main()
