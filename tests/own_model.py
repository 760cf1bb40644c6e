"""What tests of a model of one's own share: gradients to give, padding to fill, state to read."""

import numpy as np

from tiny import padding_of


def given_gradients(rng, shapes, tied, frozen, world_size, scale=1.0):
    """Draw gradients for every trainable name and alias, one row a rank."""
    names = [name for name in shapes if name not in frozen]
    names += [alias for alias, name in tied.items() if name not in frozen]
    return {
        name: np.asarray(
            scale * rng.normal(size=(world_size, *shapes[tied.get(name, name)])), np.float32
        )
        for name in names
    }


def held(opt, kinds=("param", "optim")):
    """Every array the ranks hold, with the unit it belongs to."""
    for unit in opt.units:
        if "param" in kinds:
            yield unit, unit.param
        if "optim" in kinds:
            for array in unit.optim.arrays().values():
                yield unit, array
        if "grad" in kinds and unit.grad is not None:
            yield unit, unit.grad


def fill_padding(opt, sentinel, kinds=("param", "optim")):
    """Write a sentinel where no parameter lies; return how many elements that were."""
    filled = 0
    for unit, array in held(opt, kinds):
        mask = padding_of(array, unit, opt.world)
        array[mask] = sentinel
        filled += int(mask.sum())
    return filled


def bits_of_padding(opt):
    """The bytes of all padding of parameters and optimizer states."""
    return [array[padding_of(array, unit, opt.world)].tobytes() for unit, array in held(opt)]


def full_state(opt):
    """The optimizer's moments by parameter name, joined from the ranks that own them."""
    state = {}
    for unit in opt.trainable_units:
        moments = [
            np.ascontiguousarray(unit.own(array)).reshape(-1)
            for array in unit.optim.moments.values()
        ]
        for name in unit.layout.names:
            state[name] = [unit.layout.view(flat, name) for flat in moments]
    return state


def same_bits(got, want):
    """Both have the same arrays (or lists of arrays), to the bit; -0 is not 0."""
    for name, array in got.items():
        pairs = zip(array, want[name], strict=False) if isinstance(array, list) else None
        for a, b in [(array, want[name])] if pairs is None else pairs:
            assert a.shape == b.shape, name
            assert a.dtype == b.dtype, name
            if np.ascontiguousarray(a).tobytes() != np.ascontiguousarray(b).tobytes():
                np.testing.assert_array_equal(a, b, err_msg=name)
                raise AssertionError(f"{name}: zeros of another sign")


def same_on_every_rank(opt):
    """Ranks that hold whole parameters, or whole states, hold the same ones."""
    for unit, array in held(opt):
        if array.shape[1] == unit.layout.padded_numel:
            real = np.ascontiguousarray(array[:, : unit.layout.numel])
            assert real.tobytes() == np.repeat(real[:1], len(real), axis=0).tobytes(), unit.name
