"""Where the nodes of a file stand."""

from __future__ import annotations

from collections.abc import Mapping

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider


def find_positions(wrapper: MetadataWrapper) -> Mapping[cst.CSTNode, CodeRange]:
    """Lines and columns of every node.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed meanwhile. libcst tidies up after it, and its own KeyError comes over it.
    """
    try:
        return wrapper.resolve(PositionProvider)
    except KeyError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, KeyboardInterrupt):
                raise cause from None
            cause = cause.__context__
        raise
