"""Arrays as plain pointers, inside compiled code.

numba counts the references of an array wherever a function takes it: two locked instructions a
call, which took a third of the time in loops that read a varint a call. A pointer is not counted,
and an index of it not tested for being negative. Whoever made one keeps the array alive, and
compares each index itself.
"""

from __future__ import annotations

from typing import Final

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

BYTES: Final = types.CPointer(types.uint8)


@intrinsic
def pointer_to(typing_context, array):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """To the first element of a contiguous array."""
    signature = types.CPointer(array.dtype)(array)

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return context.make_array(signature.args[0])(context, builder, arguments[0]).data

    return signature, generate


@intrinsic
def copy_bytes(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    typing_context,  # noqa: ARG001
    target,
    target_at,  # noqa: ARG001
    source,
    source_at,  # noqa: ARG001
    size,  # noqa: ARG001
):
    """C's memcpy between pointers. A loop would be slower, since numba cannot rule out that they
    overlap.
    """
    signature = types.void(target, types.int64, source, types.int64, types.int64)

    def generate(context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        to, to_at, origin, origin_at, count = arguments
        cgutils.raw_memcpy(
            builder, builder.gep(to, [to_at]), builder.gep(origin, [origin_at]), count, 1
        )
        return context.get_dummy_value()

    return signature, generate
