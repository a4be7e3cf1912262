"""The operations as compilers of frameworks need them: `interop.jax` and `interop.torch` derive from this table."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

from ..arrays import dlpack
from ..specs import SPECS
from ..specs.spec import OperationSpec


class Op(OperationSpec):
    """An operation without the arrays that only eager calls write."""

    @classmethod
    def of(cls, spec: OperationSpec) -> Op:
        fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        return cls(**{**fields, "arrays": {name: x for name, x in spec.arrays.items() if name not in spec.eager}})

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The parameters without outputs and without parameters for eager calls only: memory, a stream, `eager`."""
        left_out = {*self.outputs, *self.eager, "plan", "stream", "accumulate", "workspace"}
        parameters = [parameter for name, parameter in self.parameters.items() if name not in left_out]
        return inspect.Signature(parameters, return_annotation=Any)

    def with_pair_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call's arguments with the pair kv split into keys and scales, because compilers take only arrays."""
        kv = args[1] if len(args) > 1 else kwargs.get("kv")
        if "kv_scales" not in self.arrays or not isinstance(kv, tuple) or kwargs.get("kv_scales") is not None:
            return args, kwargs
        if len(kv) != 2:
            raise ValueError(f"kv: got {len(kv)} arrays, expected (k, scales) or one array")
        keys, scales = kv
        if len(args) > 1:
            return (args[0], keys, *args[2:]), {**kwargs, "kv_scales": scales}
        return args, {**kwargs, "kv": keys, "kv_scales": scales}

    def scratch_bytes(self, arguments: Mapping[str, Any]) -> int:
        """Bytes of temporary device memory for a call, 0 for none."""
        return 0 if self.scratch is None else self.scratch(arguments)

    def write(self, arguments: Mapping[str, Any], results: tuple[Any, ...], scratch: Any = None) -> None:
        """Call the function on arrays with memory, on the caller's current stream.

        Args:
            results, scratch: arrays for the results and the temporary memory
        """
        keywords = self.results_in(results)
        if scratch is not None:
            memory = dlpack.borrow(scratch, "scratch", writable=True)
            if self.plan is None:
                keywords["workspace"] = memory
            else:
                keywords["plan"] = self.plan(memory, batch_invariant=bool(arguments.get("batch_invariant", False)))
        self.function(**arguments, **keywords)


OPS = {spec.name: Op.of(spec) for spec in SPECS.values() if spec.compiled}
