"""What records say about the code that was measured."""

from __future__ import annotations

from pydantic import Field

from kernel_pytorch.harness.records import Name, Part


class Identity(Part):
    """What an implementation consists of.

    Attributes:
        made_by: the compiler, or the torch that runs it, with its version: "Triton 3.7.1", "nvcc 13.0", "torch 2.13.0".
        sources: digests of what was compiled or runs, by operator of C++ or name of the level's module; none of Triton.
        kernels: digests of what the compiler made of it, by bench case (Triton) or operator (C++). These are compared
            where both sides have them, and only if one compiler made both.
    """

    made_by: Name
    sources: dict[Name, str] = Field(default_factory=dict)
    kernels: dict[str, str] = Field(default_factory=dict)

    def differs(self, other: Identity) -> bool:
        """Whether another identity is one of other code."""
        common = self.kernels.keys() & other.kernels.keys() if self.made_by == other.made_by else ()
        return self.sources != other.sources or any(self.kernels[case] != other.kernels[case] for case in common)
