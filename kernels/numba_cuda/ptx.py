"""The intrinsics on a device: PTX statements and wide loads, which llvmlite puts into the kernels."""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.cuda.extending import intrinsic

from .launch import device_function

_OPERANDS = {"r": (types.uint32, ir.IntType(32)), "f": (types.float32, ir.FloatType())}
_OPERANDS |= {"l": (types.int64, ir.IntType(64)), "h": (types.uint16, ir.IntType(16))}


def _ptx(statement: str, results: str, operands: str) -> Any:
    """A device function of one PTX statement without side effects. It takes its operands as one tuple.

    Args:
        results: register kind of each result: r 32 bits, l 64, h 16, f a float32
        operands: register kind of each operand
    """
    operand_types, result_types = [_OPERANDS[x] for x in operands], [_OPERANDS[x] for x in results]
    constraints = ",".join([*(f"={x}" for x in results), *operands])

    @intrinsic
    def function(_, arguments):
        result = result_types[0][0] if len(result_types) == 1 else types.UniTuple(result_types[0][0], len(result_types))

        def generate(context, builder, signature, values):
            (kinds,) = signature.args
            unpacked = cgutils.unpack_tuple(builder, values[0])
            unpacked = [
                context.cast(builder, value, kind, wanted)
                for value, kind, (wanted, _) in zip(unpacked, kinds, operand_types, strict=True)
            ]
            made_types = [x for _, x in result_types]
            returned = made_types[0] if len(result_types) == 1 else ir.LiteralStructType(made_types)
            code = ir.InlineAsm(ir.FunctionType(returned, [x for _, x in operand_types]), statement, constraints)
            called = builder.call(code, unpacked)
            if len(result_types) == 1:
                return called
            return cgutils.pack_array(builder, [builder.extract_value(called, i) for i in range(len(result_types))])

        return result(arguments), generate

    return function


def _place(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    """A pointer to element `at` of a contiguous array."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [at])


@intrinsic
def _address(_, row, at):
    def generate(context, builder, signature, values):
        return builder.ptrtoint(_place(context, builder, signature.args[0], *values), ir.IntType(64))

    return types.int64(row, types.int64), generate


def _load(count: int, kind: Any, code_kind: Any) -> Any:
    @intrinsic
    def load(_, array, at):
        def generate(context, builder, signature, values):
            place = _place(context, builder, signature.args[0], *values)
            place = builder.bitcast(place, ir.VectorType(code_kind, count).as_pointer())
            vector = builder.load(place, align=4 * count)
            index = ir.IntType(32)
            return cgutils.pack_array(builder, [builder.extract_element(vector, index(i)) for i in range(count)])

        return types.UniTuple(kind, count)(array, types.int64), generate

    return load


load4, load2 = _load(4, types.uint32, ir.IntType(32)), _load(2, types.float32, ir.FloatType())


@intrinsic
def store4(_, array, at, four):
    def generate(context, builder, signature, values):
        vector_type = ir.VectorType(ir.IntType(32), 4)
        vector = ir.Constant(vector_type, ir.Undefined)
        for i, word in enumerate(cgutils.unpack_tuple(builder, values[2])):
            vector = builder.insert_element(vector, word, ir.IntType(32)(i))
        place = _place(context, builder, signature.args[0], *values[:2])
        builder.store(vector, builder.bitcast(place, vector_type.as_pointer()), align=16)
        return context.get_dummy_value()

    return types.none(array, types.int64, types.UniTuple(types.uint32, 4)), generate


def _reader(kind: str, register: str, count: int = 1) -> Any:
    """Predicated loads: a value that is not present causes no access."""
    results = [f"${i}" for i in range(count)]
    size = {"h": 16, "r": 32}[register]
    zeros = " ".join(f"mov.b{size} {x}, 0;" for x in results)
    target = results[0] if count == 1 else "{" + ", ".join(results) + "}"
    load = _ptx(
        f"{{ .reg .pred p; setp.ne.u32 p, ${count + 1}, 0; {zeros} @p ld.global.nc.{kind} {target}, [${count}]; }}",
        register * count, "lr",
    )  # fmt: skip

    @device_function
    def read(row, at, present):
        return load((_address(row, at), present))

    return read


read1, read2 = _reader("u8", "h"), _reader("u16", "h")
read4, read16 = _reader("u32", "r"), _reader("v4.u32", "r", 4)

_prmt = _ptx("prmt.b32 $0, $1, $2, $3;", "r", "rrr")


@device_function
def permute_bytes(x, y, selection):
    return _prmt((x, y, selection))


def _multiply(kind: str) -> Any:
    fused = _ptx(f"fma.rn.{kind}x2 $0, $1, $2, $3;", "r", "rrr")  # mul.bf16x2 needs sm_90; adding -0 changes nothing

    @device_function
    def multiply(x, y):
        return fused((x, y, np.uint32(0x80008000)))

    return multiply


def _round(kind: str) -> Any:
    convert = _ptx(f"cvt.rn.{kind}x2.f32 $0, $2, $1;", "r", "ff")

    @device_function
    def to_pair(first, second):
        return convert((first, second))

    return to_pair


def _mma(kind: str) -> Any:
    multiply_add = _ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $13}, {$4, $5, $6, $7};",
        "ffff", "ffffrrrrrr",
    )  # fmt: skip

    @device_function
    def mma(sums, a, b):
        """A warp's sums [16, 8] += a [16, 16] b [16, 8], in the registers of the PTX manual."""
        return multiply_add(sums + a + b)

    return mma


multiply_bfloat16, multiply_float16 = _multiply("bf16"), _multiply("f16")
bfloat16_pair, float16_pair = _round("bf16"), _round("f16")
mma_bfloat16, mma_float16 = _mma("bf16"), _mma("f16")


@device_function
def exponential(x):
    return math.exp(x)


@device_function
def logarithm(x):
    return math.log(x)
