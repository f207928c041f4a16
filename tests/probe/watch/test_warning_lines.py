"""Warnings point at the user's line though the watch lies between, and nothing is patched afterwards."""

import inspect
import warnings

import pytest
import torch
from torch import nn

from floatline.probe.watch.loop import Watch
from floatline.probe.watch.patches import Patches
from floatline.probe.watch.watch import _OF_HOOKS, patch_warnings, watch

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def warn_out_of_order():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(X).square().mean().backward()
    scheduler.step()  # warns
    optimizer.step()


class Warns(nn.Module):
    """Warns about its caller, `level` calls away."""

    def __init__(self, level):
        super().__init__()
        self.inner, self.level = nn.Linear(4, 1), level

    def forward(self, x):
        self.warn()
        return self.inner(x)

    def warn(self):
        warnings.warn("deep", UserWarning, stacklevel=self.level)


def call_module(level):
    return Warns(level)(X)  # warns


def warn_from_a_hook():
    model = nn.Linear(4, 1)
    model.register_forward_hook(lambda *_: warnings.warn("in a hook", stacklevel=1))
    return model(X)


def warn_plainly():
    warnings.warn("here")  # noqa: B028  # warns


def warn_an_instance():
    warnings.warn(DeprecationWarning("an instance"), stacklevel=1)  # warns


def places(call, *args, watched=None):
    """File and line of each warning that a call makes, alone or inside a watch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if watched is None:
            call(*args)
        else:
            with watch(light=watched):
                call(*args)
    return [(one.filename, one.lineno, one.category, str(one.message)) for one in caught]


def marked(function):
    """The lines of a function that say that they warn."""
    lines, first = inspect.getsourcelines(function)
    return [first + i for i, line in enumerate(lines) if line.endswith("# warns\n")]


@pytest.mark.parametrize("light", [True, False], ids=["light", "full"])
def test_a_scheduler_before_the_optimizer_warns_at_the_line_of_the_loop(light):
    found = places(warn_out_of_order, watched=light)
    told = [(file, line) for file, line, _, text in found if "lr_scheduler.step()" in text]
    assert told == [(__file__, line) for line in marked(warn_out_of_order)]


@pytest.mark.parametrize("light", [True, False], ids=["light", "full"])
@pytest.mark.parametrize("call", [warn_out_of_order, warn_from_a_hook, warn_plainly, warn_an_instance])
def test_a_warning_is_what_it_is_without_the_watch(call, light):
    alone = places(call)
    assert alone
    assert places(call, watched=light) == alone


@pytest.mark.parametrize("light", [True, False], ids=["light", "full"])
def test_a_module_that_warns_about_its_caller_does_so_through_the_watch(light):
    # Level 1 is warn(), 2 forward(), 3 and 4 torch's own calls of a module, 5 the line that calls it.
    alone = [places(call_module, level) for level in range(1, 6)]
    assert [one[:2] for one in alone[4]] == [(__file__, line) for line in marked(call_module)]
    assert [places(call_module, level, watched=light) for level in range(1, 6)] == alone


def test_a_level_beyond_the_stack_is_passed_on():
    alone = places(lambda: warnings.warn("far", stacklevel=10_000))
    watched = places(lambda: warnings.warn("far", stacklevel=10_000), watched=True)
    assert [one[:2] for one in watched] == [one[:2] for one in alone]


def test_the_original_function_is_back_afterwards():
    plain = warnings.warn
    with watch(light=True):
        assert warnings.warn is not plain
    assert warnings.warn is plain
    with pytest.raises(ZeroDivisionError), watch():
        raise ZeroDivisionError
    assert warnings.warn is plain


def test_a_warning_that_is_an_error_reaches_the_loop():
    with warnings.catch_warnings(), watch(light=True), pytest.raises(UserWarning, match="here"):
        warnings.simplefilter("error")
        warn_plainly()


class Records:
    """A listener that records, or does not."""

    def __init__(self, records):
        self.records = records


@pytest.mark.parametrize(("records", "num"), [(True, 0), (False, 1), (None, 1)])
def test_torch_says_nothing_of_the_hooks_of_the_recorder_and_still_of_those_of_the_loop(records, num):
    seen, patches = Watch(light=True), Patches()
    seen.listener = None if records is None else Records(records)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch_warnings(seen, patches)
        try:
            warnings.warn(f"{_OF_HOOKS} (e.g., one)", stacklevel=1)
            warnings.warn("another", stacklevel=1)
        finally:
            patches.undo()
    assert [str(one.message) for one in caught][num:] == ["another"]


def test_the_words_are_those_of_torch():
    from torch.nn.modules.module import register_module_forward_hook

    model = torch.compile(nn.Linear(4, 1), backend="eager")
    hook = register_module_forward_hook(lambda *_: None)
    try:
        with pytest.warns(UserWarning) as caught:
            model(X)
    finally:
        hook.remove()
    assert any(str(one.message).startswith(_OF_HOOKS) for one in caught)
