"""CUDA C++ as C++ for the emulator: every inline PTX statement is replaced according to a table.

The emulation supports only the table's statements; other statements are errors.
"""

import re

# PTX -> C++, with the same operand numbers. PTX is in the form of normalised().
TABLE = {
    "": "",
    # numbers
    "cvt.f32.f16 %0, %1;": "%0 = emulator::from_f16(%1)",
    "cvt.f64.f32 %0, %1;": "%0 = emulator::to_double(%1)",
    "{ .reg .pred p; setp.gt.f32 p, %1, %2; @p or.b32 %0, %0, %3; }": (
        "if (emulator::to_double(%1) > emulator::to_double(%2)) %0 |= %3"
    ),
    "{ .reg .pred p; setp.gt.f32 p, %1, %2; selp.u32 %0, %3, 0, p; }": (
        "%0 = emulator::to_double(%1) > emulator::to_double(%2) ? %3 : 0"
    ),
    "{ .reg .pred p; setp.eq.f32 p, %1, %2; @p or.b32 %0, %0, %3; }": (
        "if (emulator::to_double(%1) == emulator::to_double(%2)) %0 |= %3"
    ),
    "cvt.rn.f32.f64 %0, %1;": "%0 = emulator::to_float(%1)",
    "cvt.rn.bf16x2.f32 %0, %1, %2;": "%0 = emulator::to_bf16x2(%2, %1)",
    "cvt.rn.f16x2.f32 %0, %1, %2;": "%0 = emulator::to_f16x2(%2, %1)",
    "cvt.rn.f16x2.e4m3x2 %0, %1;": "%0 = emulator::e4m3x2_to_f16x2(%1)",
    "cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;": "%0 = emulator::to_e4m3x2(%2, %1)",
    "{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }": (
        "unsigned bytes_ = %2; %0 = emulator::e4m3x2_to_f16x2(bytes_); %1 = emulator::e4m3x2_to_f16x2(bytes_ >> 16)"
    ),
    "cvt.rn.satfinite.f16x2.f32 %0, %1, %2;": "%0 = emulator::to_f16x2_saturated(%2, %1)",
    "max.NaN.xorsign.abs.bf16x2 %0, %0, %1;": "%0 = emulator::max_magnitudes_bf16x2(%0, %1)",
    "mul.rn.f32 %0, %1, %2;": "%0 = emulator::multiply(%1, %2)",
    "div.rn.f32 %0, %1, %2;": "%0 = emulator::divide(%1, %2)",
    "max.NaN.f32 %0, %1, 0f00000000;": "%0 = (%1) < 0 ? 0.0f : (%1)",
    "max.f32 %0, %1, %2;": (
        "float a_ = %1, b_ = %2; %0 = a_ != a_ || emulator::to_double(a_) < emulator::to_double(b_) ? b_ : a_"
    ),
    "fma.rn.bf16x2 %0, %1, %2, %3;": "%0 = emulator::fma_bf16x2(%1, %2, %3)",
    "fma.rn.f16x2 %0, %1, %2, %3;": "%0 = emulator::fma_f16x2(%1, %2, %3)",
    "mul.rn.f16x2 %0, %1, %2;": "%0 = emulator::multiply_f16x2(%1, %2)",
    "{ .reg .b32 m; abs.f16x2 m, %1; max.f16x2 %0, %0, m; }": "%0 = emulator::max_f16x2(%0, %1 & 0x7fff7fffu)",
    "{ .reg .b32 m; abs.f16x2 m, %1; min.f16x2 %0, m, %2; }": "%0 = emulator::min_f16x2(%1 & 0x7fff7fffu, %2)",
    "add.rn.f16x2 %0, %1, %2;": "%0 = emulator::add_f16x2(%1, %2)",
    "set.ge.u32.f16x2 %0, %1, %2;": "%0 = emulator::at_least_f16x2(%1, %2)",
    "prmt.b32 %0, %1, 0, 0xbb99;": "%0 = (%1 >> 15 & 1) * 0xffffu | (%1 >> 31) * 0xffff0000u",
    "prmt.b32 %0, %1, %2, %3;": "%0 = __byte_perm(%1, %2, %3)",
    "prmt.b32 %0, %1, 0, %2;": "%0 = __byte_perm(%1, 0, %2)",
    "ex2.approx.ftz.f32 %0, %1;": "%0 = exp2f(%1)",
    "lg2.approx.ftz.f32 %0, %1;": "%0 = log2f(%1)",
    "rcp.approx.ftz.f32 %0, %1;": "%0 = 1.0f / %1",
    # memory that is indexed in PTX
    "{ .reg .u64 a; mad.wide.u32 a, %1, 4, %2; ld.global.nc.u32 %0, [a]; }": (
        "%0 = *reinterpret_cast<const int*>(reinterpret_cast<uint64_t>(%2) + 4ull * unsigned(%1))"
    ),
    "{ .reg .pred p; setp.ne.b32 p, %5, 0; @p ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4]; }": (
        "if (%5) { auto from_ = reinterpret_cast<const float*>(emulator::global_at(%4, 16)); "
        "%0 = from_[0]; %1 = from_[1]; %2 = from_[2]; %3 = from_[3]; }"
    ),
    "{ .reg .pred p; setp.ne.b32 p, %2, 0; @p ld.global.nc.f32 %0, [%1]; }": (
        "if (%2) %0 = *reinterpret_cast<const float*>(emulator::global_at(%1, 4))"
    ),
    "{ .reg .pred p; setp.ne.u64 p, %1, 0; @p ld.relaxed.gpu.global.s32 %0, [%1]; }": (
        "if (%1) %0 = *reinterpret_cast<const int*>(emulator::global_at(%1, 4))"
    ),
    # asynchronous copies
    "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;": "emulator::copy_async(%0, %1, 16, %2)",
    "cp.async.cg.shared.global [%0], [%1], 16, %2;": "emulator::copy_async(%0, %1, 16, %2)",
    "cp.async.cg.shared.global.L2::128B [%0], [%1], 16;": "emulator::copy_async(%0, %1, 16, 16)",
    "cp.async.ca.shared.global [%0], [%1], 4;": "emulator::copy_async(%0, %1, 4, 4)",
    "cp.async.ca.shared.global [%0], [%1], %2, %3;": "emulator::copy_async(%0, %1, %2, %3)",
    "cp.async.commit_group;": "emulator::copies_commit()",
    "cp.async.wait_group %0;": "emulator::copies_wait(%0)",
    "cp.async.mbarrier.arrive.noinc.shared.b64 [%0];": "emulator::copies_arrive(%0)",
    "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[%0], [%1, {%2, %3, %4}], [%5];": "emulator::copy_box(%0, %1, %2, %3, %4, %5)",
    "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
    "[%0], [%1, {%2, %3, %4}], [%5], %6;": "emulator::copy_box(%0, %1, %2, %3, %4, %5)",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;": (
        "emulator::copy_bytes(%0, %1, %2, %3)"
    ),
    "{ .reg .pred one; elect.sync _|one, 0xffffffff; "
    "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3]; }": (
        "if (threadIdx.x % 32 == 0) emulator::copy_bytes(%0, %1, %2, %3)"
    ),
    "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;": "emulator::store_bytes(%0, %1, %2)",
    "cp.async.bulk.commit_group;": "emulator::stores_commit()",
    "cp.async.bulk.wait_group.read %0;": "emulator::stores_wait(%0)",
    "cp.async.bulk.wait_group %0;": "emulator::stores_wait(%0)",
    # barriers
    "bar.sync 1, 128;": "emulator::named_sync(1, 128)",
    "{ .reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, 1, 128, p; selp.u32 %0, 1, 0, q; }": (
        "%0 = emulator::named_sync_or(1, 128, %1)"
    ),
    "{ .reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, %2, 128, p; selp.u32 %0, 1, 0, q; }": (
        "%0 = emulator::named_sync_or(%2, 128, %1)"
    ),
    "{ .reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, %2, %3, p; selp.u32 %0, 1, 0, q; }": (
        "%0 = emulator::named_sync_or(%2, %3, %1)"
    ),
    "bar.sync %0, 128;": "emulator::named_sync(%0, 128)",
    "bar.sync %0, %1;": "emulator::named_sync(%0, %1)",
    "bar.arrive %0, %1;": "emulator::named_arrive(%0, %1)",
    "mbarrier.init.shared.b64 [%0], %1;": "emulator::barrier_init(%0, %1)",
    "{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }": "emulator::barrier_arrive(%0, 1)",
    "{ .reg .pred done; again: mbarrier.test_wait.parity.shared.b64 done, [%0], %1; @!done bra again; }": (
        "emulator::barrier_wait(%0, %1)"
    ),
    "{ .reg .pred done; mbarrier.test_wait.parity.shared.b64 done, [%1], %2; selp.u32 %0, 1, 0, done; }": (
        "%0 = emulator::barrier_passed(%1, %2)"
    ),
    "mbarrier.arrive.shared.b64 _, [%0], %1;": "emulator::barrier_arrive(%0, %1)",
    "mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;": (
        "emulator::barrier_expect(%0, %1); emulator::barrier_arrive(%0, 1)"
    ),
    "{ .reg .pred one; elect.sync _|one, 0xffffffff; @one mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1; }": (
        "if (threadIdx.x % 32 == 0) emulator::barrier_expect(%0, %1), emulator::barrier_arrive(%0, 1)"
    ),
    "{ .reg .pred one; elect.sync _|one, 0xffffffff; @one mbarrier.arrive.shared.b64 _, [%0]; }": (
        "if (threadIdx.x % 32 == 0) emulator::barrier_arrive(%0, 1)"
    ),
    "{ .reg .pred done; again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; @!done bra again; }": (
        "emulator::barrier_wait(%0, %1)"
    ),
    "ld.relaxed.gpu.global.s32 %0, [%1];": "%0 = *reinterpret_cast<const int*>(emulator::global_at(%1, 4))",
    "griddepcontrol.wait;": "emulator::wait_for_kernel_ahead()",
    "mov.u32 %0, %%tid.x;": "%0 = threadIdx.x",
    "mov.u32 %0, %%ctaid.x;": "%0 = blockIdx.x",
    # clusters
    "mov.u32 %0, %%cluster_ctarank;": "%0 = emulator::cluster_rank",
    "mapa.shared::cluster.u32 %0, %1, %2;": "%0 = emulator::mapped(%1, %2)",
    "st.shared::cluster.f32 [%0], %1;": "*reinterpret_cast<float*>(emulator::cluster_shared_at(%0, 4)) = %1",
    "ld.shared::cluster.v2.f32 {%0, %1}, [%2];": (
        "auto from_ = reinterpret_cast<const float*>(emulator::cluster_shared_at(%2, 8)); %0 = from_[0]; %1 = from_[1]"
    ),
    "st.shared::cluster.u32 [%0], %1;": "*reinterpret_cast<uint32_t*>(emulator::cluster_shared_at(%0, 4)) = %1",
    "ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];": (
        "auto from_ = reinterpret_cast<const uint32_t*>(emulator::cluster_shared_at(%4, 16)); "
        "%0 = from_[0]; %1 = from_[1]; %2 = from_[2]; %3 = from_[3]"
    ),
    "atom.shared.add.u32 %0, [%1], %2;": (
        "auto at_ = reinterpret_cast<uint32_t*>(emulator::shared_at(%1, 4)); %0 = *at_; *at_ += %2"
    ),
    "red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;": (
        "*reinterpret_cast<uint32_t*>(emulator::cluster_shared_at(%0, 4)) += %1"
    ),
    "st.shared::cluster.b64 [%0], %1;": "*reinterpret_cast<uint64_t*>(emulator::cluster_shared_at(%0, 8)) = %1",
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];": (
        "emulator::store_async(%0, {%1, %2}, %3)"
    ),
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];": (
        "emulator::store_async(%0, {%1, %2, %3, %4}, %5)"
    ),
    "{ .reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1; "
    "@!done bra again; }": "emulator::barrier_wait(%0, %1)",
    "barrier.cluster.arrive.release.aligned;": "emulator::cluster_arrive()",
    "barrier.cluster.arrive.relaxed.aligned;": "emulator::cluster_arrive()",
    "barrier.cluster.wait.acquire.aligned;": "emulator::cluster_wait()",
    # matrices
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];": (
        "emulator::load_matrices(%0, %1, %2, %3, %4, false)"
    ),
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];": (
        "emulator::load_matrices(%0, %1, %2, %3, %4, true)"
    ),
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};": (
        "emulator::store_matrices(%0, %1, %2, %3, %4, false)"
    ),
    "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};": (
        "emulator::store_matrices(%0, %1, %2, %3, %4, true)"
    ),
    "movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;": "%0 = emulator::transpose_matrix(%1)",
    "wgmma.commit_group.sync.aligned;": "emulator::wgmma_commit()",
    "wgmma.wait_group.sync.aligned %0;": "emulator::wgmma_wait(%0)",
    "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};": (
        "emulator::mma_f64(%0, %1, %2, %3)"
    ),
    # statements without effect on one CPU thread that runs in order
    "fence.mbarrier_init.release.cluster;": "",
    "fence.proxy.async.shared::cta;": "",
    "griddepcontrol.launch_dependents;": "",
    "prefetch.tensormap [%0];": "",
    "prefetch.global.L2 [%0];": "",
    "setmaxnreg.dec.sync.aligned.u32 %0;": "",
    "setmaxnreg.inc.sync.aligned.u32 %0;": "",
    "wgmma.fence.sync.aligned;": "",
}
for name in ("f16", "bf16"):
    TABLE[
        f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
    ] = f"emulator::mma({', '.join(f'%{i}' for i in range(10))}, {str(name == 'bf16').lower()})"

# Plain loads and stores: the C++ type of each PTX type, and the number of elements.
TYPES = {"u8": "unsigned char", "u16": "unsigned short", "u32": "unsigned", "s32": "int", "f32": "float"}
for ptx_type, c_type in TYPES.items():
    for count in (1, 2, 4):
        vector = f".v{count}" if count > 1 else ""
        size = f"{count} * sizeof({c_type})"
        values = [f"%{i}" for i in range(count + 1)]
        loaded = "; ".join(f"{value} = from_[{i}]" for i, value in enumerate(values[:-1]))
        stored = "; ".join(f"to_[{i}] = {value}" for i, value in enumerate(values[1:]))
        many = "{{{}}}" if count > 1 else "{}"
        operands_in, operands_out = (many.format(", ".join(part)) for part in (values[:-1], values[1:]))
        for space in ("shared", "global", "global.nc", "global.cs", "global.cs.nc"):
            at = (
                "emulator::shared_at({}, " + size + ")"
                if space == "shared"
                else "emulator::global_at({}, " + size + ")"
            )
            TABLE[f"ld.{space}{vector}.{ptx_type} {operands_in}, [{values[-1]}];"] = (
                f"auto from_ = reinterpret_cast<const {c_type}*>({at.format(values[-1])}); {loaded}"
            )
            TABLE[f"st.{space}{vector}.{ptx_type} [%0], {operands_out};"] = (
                f"auto to_ = reinterpret_cast<{c_type}*>({at.format('%0')}); {stored}"
            )

# Products of warpgroups are macros of sm90/hopper.cuh: `#name` in a statement is an argument of the macro.
PRODUCT = (
    "{ .reg .pred p; setp.ne.b32 p, %#add, 0; "
    "wgmma.mma_async.sync.aligned.m64n#columnsk#depth.f32.#a_type.#b_type {}, OPERANDS, p, #__VA_ARGS__; }"
)
PRODUCTS = {
    PRODUCT.replace("add", "o3").replace("OPERANDS", "%#o1, %#o2"): "nullptr, a, b",
    PRODUCT.replace("add", "o6").replace("OPERANDS", "{%#o1, %#o2, %#o3, %#o4}, %#o5"): "a, 0, b",
}
for ptx, operands in PRODUCTS.items():
    TABLE[ptx] = f"emulator::wgmma(x, columns, {operands}, add, emulator::Operands::a_type, {{__VA_ARGS__}})"

ASM = re.compile(r"\basm\b(?:\s+volatile)?\s*\(")
LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
PIECE = re.compile(LITERAL.pattern + r"|(?<!#)(#\w+)")
OPERAND = re.compile(r'^\s*"[^"]*"\s*\((.*)\)\s*$', re.DOTALL)
# A kernel; a macro, or __cluster_dims__, gives the number of blocks of a cluster.
KERNEL = re.compile(
    r'extern "C" (?P<cluster>\w+(?:\([^)]*\))? )?__global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(?P<name>\w+)\('
)
# The part for a debugger, which waits without letting other threads run.
WATCHDOG = re.compile(r"^#ifdef WATCHDOG\n.*?^#else\n(.*?)^#endif\n", re.MULTILINE | re.DOTALL)


def translated(text):
    """A CUDA source, its includes put in, as a C++ source with a function emulated_<name> for each kernel."""
    text = WATCHDOG.sub(r"\1", text)
    text = re.sub(
        r"extern __shared__ (\w+) memory\[\];",
        r"\1* memory = reinterpret_cast<\1*>(emulator::shared_memory + emulator::DYNAMIC_SHARED_AT);",
        text,
    )
    text = re.sub(r"const __grid_constant__ (\w+) (\w+)", r"const \1& \2", text)  # so that its address can be taken
    clusters = {match["name"]: match["cluster"] or "" for match in KERNEL.finditer(text)}
    text = KERNEL.sub(lambda match: match[0].replace(match["cluster"] or "", "", 1), text)
    parts, end = [], 0
    while match := ASM.search(text, end):
        parts.append(text[end : match.start()])
        sections, end = split(text, match.end(), ":")
        parts.append(f"do {{ {statement(*sections[:3])}; }} while (0)")
    parts.append(text[end:])
    entries = [
        f'extern "C" EXPORT void emulated_{name}(const void* packed) {{ emulator::call({name}, packed); }}\n'
        f'extern "C" EXPORT unsigned emulated_cluster_of_{name}{{{cluster}}};\n'
        for name, cluster in clusters.items()
    ]
    return '#include "device.h"\n' + "".join(parts) + "\n" + "".join(entries)


def statement(template, outputs="", inputs=""):
    """C++ for one statement; `asm` gives its template, then its operands."""
    ptx = normalised(template)
    values = [OPERAND.sub(r"\1", operand) for part in (outputs, inputs) for operand in listed(part)]
    if ptx not in TABLE:
        raise LookupError(f"the emulator does not know {ptx!r}")
    return re.sub(r"%(\d+)", lambda number: f"({values[int(number[1])]})", TABLE[ptx])


def normalised(template):
    r"""A template's string literals and #arguments as one text, a space for \n and more space; macros left out."""
    text = "".join(literal or argument for literal, argument in PIECE.findall(template)).replace("\\n", " ")
    return " ".join(text.split())


def listed(part):
    """Split a list of operands."""
    found, _ = split(part + ")", 0, ",")
    return [operand for operand in found if operand.strip()]


def split(text, start, separator):
    """The text between separators from `start` up to the closing parenthesis, and where that ends."""
    found, depth, begin, i = [], 0, start, start
    while True:
        literal = LITERAL.match(text, i)
        if literal:
            i = literal.end()
            continue
        c = text[i]
        if depth == 0 and c in (separator, ")"):
            found.append(text[begin:i])
            begin = i + 1
            if c == ")":
                return found, begin
        depth += (c in "([{") - (c in ")]}")
        i += 1
