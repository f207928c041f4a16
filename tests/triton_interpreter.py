"""Triton's interpreter, fixed where it does not agree with numpy.

Up to Triton 3.6 it takes the bound of a loop by int() of an array with one element and one dimension, which numpy 2.4
refuses. It concerns the interpreter alone: on a GPU kernels are compiled.
"""

from triton.runtime import interpreter


def allow_tensors_as_bounds():
    """Let `range(tensor)` in a kernel work in the interpreter, whatever the versions are."""
    patch = interpreter._patch_lang_tensor
    if getattr(patch, "fixed", False):
        return

    def patch_and_fix(tensor, *scope):
        def as_index(self):
            return int(self.handle.data.item())

        patch(tensor, *scope)
        if scope:
            scope[0].set_attr(tensor, "__index__", as_index)
        else:  # older interpreters patch for good
            tensor.__index__ = as_index

    patch_and_fix.fixed = True
    interpreter._patch_lang_tensor = patch_and_fix
