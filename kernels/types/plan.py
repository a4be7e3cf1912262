"""How the work of a decode step is spread over a device, made once and used by every layer of a type."""

from __future__ import annotations

from typing import Any


class DecodePlan:
    """A plan for `sparse_mla_decode`, and the device memory that its kernels need beside their arguments.

    Made empty; the first call that is given the plan makes it, on the device, from that call's lengths, and
    the calls after it use it as it is. `renew` makes the next call plan again (metadata builders do so every
    step). A plan decides who does what and never what the result is: one made for other lengths is slower,
    not wrong.

    The memory is allocated when it is first needed and then stays where it is, so that a captured graph whose
    plan has served an eager call allocates nothing; where the plan was renewed just before the capture, the graph
    plans anew at every replay. One plan serves one stream at a time. The CPU backends do not need it.

    workspace  uint8 [n] on the device, to be used instead of allocating; what it must have room for is the
               backend's to say (`workspace_bytes` in kernels/cuda/sparse_work.py)
    """

    def __init__(self, workspace: Any = None) -> None:
        self.workspace = workspace
        self.memory: Any = None  # the backend's
        self.outgrown: list[Any] = []  # memory that was too small for a later call: captured graphs may still use it
        self.made_for: tuple[int, ...] | None = None  # the shape that the plan on the device is for

    def renew(self) -> None:
        """Let the next call plan again."""
        self.made_for = None

    def __repr__(self) -> str:
        return f"DecodePlan(made_for={self.made_for})"
