"""Ctrl-C waits for the end of a block, once."""

import signal
import threading

import pytest

from floatline.base.interrupts import Undisturbed


def press():
    signal.raise_signal(signal.SIGINT)


def test_it_is_heard_when_the_block_is_over():
    done = []
    with pytest.raises(KeyboardInterrupt), Undisturbed():
        press()
        done.append(True)
    assert done
    with pytest.raises(KeyboardInterrupt):
        press()


def test_blocks_in_blocks_are_over_with_the_outermost():
    done = []
    with pytest.raises(KeyboardInterrupt), Undisturbed():
        with Undisturbed():
            press()
            done.append(1)
        done.append(2)
    assert done == [1, 2]


def test_a_second_one_does_not_wait():
    done = []
    with pytest.raises(KeyboardInterrupt), Undisturbed():
        press()
        press()
        done.append(True)
    assert not done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_the_block_raises_comes_first_and_is_kept_as_the_context():
    with pytest.raises(KeyboardInterrupt) as caught, Undisturbed():
        press()
        raise ValueError("of the block")
    assert isinstance(caught.value.__context__, ValueError)


def test_without_ctrl_c_nothing_is_left_behind():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="own"), Undisturbed():
        raise ValueError("own")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_that_the_block_puts_there_stays():
    def own(number, frame):
        pass

    before = signal.getsignal(signal.SIGINT)
    try:
        with Undisturbed():
            signal.signal(signal.SIGINT, own)
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_handlers_are_called_when_the_block_is_over():
    order = []
    before = signal.signal(signal.SIGINT, lambda *_: order.append("heard"))
    try:
        with Undisturbed():
            press()
            order.append("done")
    finally:
        signal.signal(signal.SIGINT, before)
    assert order == ["done", "heard"]


def test_in_another_thread_nothing_is_done():
    found = []

    def run():
        with Undisturbed():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
