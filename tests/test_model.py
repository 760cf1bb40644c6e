"""Layers and models: gradients, bits, bytes kept, and PyTorch's first step."""

import math
import string

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import golden
from zero_nb.config import UsageError
from zero_nb.train import model as model_module
from zero_nb.train.model import (
    DIGITS,
    GPT,
    LESSON,
    MLP,
    Attention,
    FeedForward,
    GPTConfig,
    Head,
    MLPConfig,
)

SENTINEL = -7.25e7
TINY = GPTConfig(vocab_size=7, seq_len=5, width=6, heads=3, blocks=2)
GPTS = {"tiny": TINY, "odd": GPTConfig(11, 9, 21, 3, 1), "digits": DIGITS}
MLPS = {"odd": (13, 37, 29, 3), "thin": (3, 1, 2), "single": (5, 2)}


@pytest.fixture(autouse=True)
def _one_blas_thread():
    with threadpool_limits(1):
        yield


def flat_views(model, ranks, dtype=np.float32, pad=5):
    """A (R, F) buffer full of sentinels and a view of it for each parameter, end to end."""
    flat = np.full((ranks, model.numel + pad), SENTINEL, dtype)
    views, start = {}, 0
    for name, shape in model.shapes.items():
        stop = start + math.prod(shape)
        views[name] = flat[:, start:stop].reshape(ranks, *shape)
        assert views[name].base is not None
        start = stop
    return flat, views


def problem(model, ranks, batch, dtype=np.float32, seed=0, steps=None):
    """Parameters that differ between ranks, an input and targets."""
    rng = np.random.default_rng(seed)
    flat, params = flat_views(model, ranks, dtype)
    for name, view in params.items():
        centre = 1.0 if name.endswith(("ln1.weight", "ln2.weight", "lnf.weight")) else 0.0
        view[...] = rng.normal(centre, 0.3, view.shape)
    flat.flags.writeable = False
    for view in params.values():
        view.flags.writeable = False
    if isinstance(model, GPT):
        shape = (ranks, batch, steps or model.config.seq_len)
        x, t = rng.integers(0, model.config.vocab_size, (2, *shape))
    else:
        sizes = model.config.sizes
        x = rng.normal(size=(ranks, batch, sizes[0])).astype(dtype)
        t = rng.normal(size=(ranks, batch, sizes[-1])).astype(dtype)
    x.flags.writeable = t.flags.writeable = False
    return params, x, t


def gradients(model, params, x, t, count):
    """Loss shares, gradient buffer, and the gradient's views."""
    flat, grads = flat_views(model, len(x), next(iter(params.values())).dtype)
    y, caches = model.forward(params, x)
    kept = [[array.copy() for array in cache] for cache in caches]
    loss_R, dy = model.loss(y, t, count)
    model.backward(params, caches, dy, grads)
    for cache, copies in zip(caches, kept, strict=True):
        for array, copy in zip(cache, copies, strict=True):
            assert array.dtype == copy.dtype
            np.testing.assert_array_equal(array, copy)  # backward reads its cache only
    return loss_R, flat, grads


def models():
    for name, config in GPTS.items():
        yield pytest.param(GPT(config), id=f"gpt-{name}")
    for name, sizes in MLPS.items():
        yield pytest.param(MLP(MLPConfig(sizes)), id=f"mlp-{name}")


every_model = pytest.mark.parametrize("model", list(models()))


# ------------------------------------------------------------------------------- what PyTorch says


@pytest.mark.parametrize("name", golden.MODELS)
def test_the_first_step_is_pytorchs(name):
    model = golden.MODELS[name]
    params = {key: value[None] for key, value in golden.init(name).items()}
    x, t = (array[None] for array in golden.batch(name, 0))
    loss_R, _, grads = gradients(model, params, x, t, model.count(t))
    # Both are float32 sums of at most 256 terms in another order.
    assert loss_R[0] == pytest.approx(golden.run(name, "adamw").loss[0], rel=1e-6)
    for key, wanted in golden.grad0(name).items():
        # Rounding is measured against the largest element: small ones are differences of such.
        # The key bias has none of its own (its true gradient is 0), so the queries' stands in.
        tolerance = 2e-6 * np.abs(wanted).max()
        np.testing.assert_allclose(grads[key][0], wanted, rtol=0, atol=tolerance, err_msg=key)


@pytest.mark.parametrize("name", golden.MODELS)
def test_four_ranks_share_pytorchs_first_step(name):
    model = golden.MODELS[name]
    params = {key: np.stack([value] * 4) for key, value in golden.init(name).items()}
    x, t = (array.reshape(4, 4, *array.shape[1:]) for array in golden.batch(name, 0))
    loss_R, _, grads = gradients(model, params, x, t, model.count(t))
    assert loss_R.sum() == pytest.approx(golden.run(name, "adamw").loss[0], rel=1e-6)
    for key, wanted in golden.grad0(name).items():
        tolerance = 2e-6 * np.abs(wanted).max()
        np.testing.assert_allclose(grads[key].sum(0), wanted, rtol=0, atol=tolerance, err_msg=key)


# ------------------------------------------------------------------------------ finite differences


def share_of(model, params, x, t, count):
    """Loss share of each rank (R,)."""
    return model.loss(model.forward(params, x)[0], t, count)[0]


FINITE = [
    pytest.param(GPT(TINY), 4, id="gpt"),  # one position stays unused
    pytest.param(MLP(MLPConfig((3, 5, 4, 2))), None, id="mlp"),
]


@pytest.mark.parametrize(("model", "steps"), FINITE)
def test_gradients_are_the_slope_of_the_loss(model, steps):
    params, x, t = problem(model, ranks=2, batch=3, dtype=np.float64, steps=steps)
    count = 2 * model.count(t)  # other micro-batches share the mean
    _, _, grads = gradients(model, params, x, t, count)
    rng = np.random.default_rng(1)
    h = 1e-5
    for name, value in params.items():
        directions = [rng.normal(size=value.shape) for _ in range(2)]
        for at in rng.choice(value[0].size, min(4, value[0].size), replace=False):
            single = np.zeros_like(value)
            single.reshape(2, -1)[:, at] = 1
            directions.append(single)
        for way in directions:
            up = share_of(model, {**params, name: value + h * way}, x, t, count)
            down = share_of(model, {**params, name: value - h * way}, x, t, count)
            along = (grads[name] * way).reshape(2, -1).sum(axis=1)
            # The difference is off by h^2 times a third derivative and 1e-16 / h of rounding.
            np.testing.assert_allclose((up - down) / (2 * h), along, rtol=1e-6, atol=1e-9)


def test_a_shift_of_all_keys_changes_nothing():
    model = GPT(TINY)
    params, x, t = problem(model, 2, 3, np.float64)
    _, _, grads = gradients(model, params, x, t, model.count(t))
    width = TINY.width
    for block in ("layers.0", "layers.1"):
        q, k, v = np.split(grads[f"{block}.qkv.bias"], [width, 2 * width], axis=-1)
        assert np.abs(k).max() < 1e-15
        assert min(np.abs(q).max(), np.abs(v).max()) > 1e-4


# ------------------------------------------------------------------------------------------- bits


def bits(array):
    """An array's bits, so that even the sign of a zero counts."""
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.itemsize}")


@every_model
@pytest.mark.parametrize("batch", [1, 3])
def test_a_rank_has_the_same_bits_alone_in_a_stack_and_in_chunks(model, batch):
    ranks = 5
    params, x, t = problem(model, ranks, batch)
    count = model.count(t)
    loss_R, flat, _ = gradients(model, params, x, t, count)
    logits, _ = model.forward(params, x)
    for chunks in ([0, 1, 2, 3, 4, 5], [0, 2, 5], [0, 4, 5]):
        for start, stop in zip(chunks[:-1], chunks[1:], strict=True):
            part = {name: value[start:stop] for name, value in params.items()}
            own, own_flat, _ = gradients(model, part, x[start:stop], t[start:stop], count)
            y, _ = model.forward(part, x[start:stop])
            np.testing.assert_array_equal(bits(y), bits(logits[start:stop]))
            np.testing.assert_array_equal(bits(own), bits(loss_R[start:stop]))
            np.testing.assert_array_equal(bits(own_flat), bits(flat[start:stop]))


@every_model
def test_where_the_arrays_lie_changes_no_bit(model):
    params, x, t = problem(model, 2, 3)
    loss_R, flat, _ = gradients(model, params, x, t, 100)
    # The same numbers, each parameter an array of its own.
    own = {name: np.ascontiguousarray(value) for name, value in params.items()}
    again, flat_again, _ = gradients(model, own, x, t, 100)
    np.testing.assert_array_equal(bits(loss_R), bits(again))
    np.testing.assert_array_equal(bits(flat), bits(flat_again))


@every_model
def test_gradients_fill_their_views_and_nothing_else(model):
    params, x, t = problem(model, 3, 2)
    _, flat, grads = gradients(model, params, x, t, model.count(t))
    assert np.all(flat[:, model.numel :] == SENTINEL)
    for name, grad in grads.items():
        assert np.isfinite(grad).all(), name
        assert not np.any(grad == SENTINEL), name


@every_model
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_everything_has_the_dtype_of_the_parameters(model, dtype):
    params, x, t = problem(model, 2, 2, dtype)
    y, caches = model.forward(params, x)
    loss_R, dy = model.loss(y, t, model.count(t))
    assert loss_R.dtype == np.float64
    assert y.dtype == dy.dtype == dtype
    _, grads = flat_views(model, 2, dtype)
    for layer, cache in zip(reversed(model.layers), reversed(caches), strict=True):
        assert {array.dtype for array in cache} <= {np.dtype(dtype), x.dtype}
        dy = layer.backward(params, cache, dy, grads)
        assert dy is None or dy.dtype == dtype
    assert dy is None  # nobody needs the gradient of the input


# ----------------------------------------------------------------------------------- what is kept


def owner(array):
    """The array whose memory this is a view of."""
    while array.base is not None:
        array = array.base
    return array


def owned_bytes(arrays):
    """Bytes that stay alive with these arrays, each storage once."""
    return sum({id(owner(a)): owner(a).nbytes for a in arrays}.values())


@pytest.mark.parametrize("config", [TINY, DIGITS, LESSON])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_layer_keeps_what_its_docstring_says(config, dtype):
    model = GPT(config)
    ranks, batch = 2, 3
    params, x, _ = problem(model, ranks, batch, dtype)
    _, caches = model.forward(params, x)
    d, h, t = config.width, config.heads, config.seq_len
    per_token = {Attention: 5 * d + h * t + 1, FeedForward: 9 * d + 1, Head: d + 1}
    embedding, *rest = zip(model.layers, caches, strict=True)
    assert embedding[1][0] is x
    for layer, cache in rest:
        wanted = ranks * batch * t * per_token[type(layer)] * np.dtype(dtype).itemsize
        assert owned_bytes(cache) == wanted, layer.name
    held = [array for _, cache in rest for array in cache]
    assert owned_bytes(held) == sum(owned_bytes(cache) for _, cache in rest)


def test_an_mlp_keeps_each_activation_once():
    sizes = (13, 37, 29, 3)
    model = MLP(MLPConfig(sizes))
    params, x, _ = problem(model, 2, 5)
    _, caches = model.forward(params, x)
    held = [array for cache in caches for array in cache if array is not x]
    assert owned_bytes(held) == 2 * 5 * (37 + 29) * 4


@every_model
def test_the_gradient_of_the_loss_takes_the_place_of_the_output(model):
    params, x, t = problem(model, 2, 2)
    y, _ = model.forward(params, x)
    _, dy = model.loss(y, t, model.count(t))
    assert np.shares_memory(y, dy)
    assert dy.shape == y.shape


# ------------------------------------------------------------------------------------------- loss


@every_model
def test_shares_of_the_loss_add_up(model):
    params, x, t = problem(model, 1, 12)
    whole, flat, _ = gradients(model, params, x, t, model.count(t))
    ranks = 4
    copies = {name: np.repeat(value, ranks, axis=0) for name, value in params.items()}
    parts = [array.reshape(ranks, 3, *array.shape[2:]) for array in (x, t)]
    shares, flats, _ = gradients(model, copies, *parts, model.count(t))
    # The same float32 sums in another order; losses are summed in float64.
    assert shares.sum() == pytest.approx(whole[0], rel=1e-6)
    np.testing.assert_allclose(
        flats[:, : model.numel].sum(0), flat[0, : model.numel], rtol=0,
        atol=3e-6 * np.abs(flat[0, : model.numel]).max(),
    )  # fmt: skip


def test_equal_logits_cost_the_logarithm_of_the_vocabulary():
    model = GPT(TINY)
    t = np.zeros((2, 3, 5), np.int64)
    y = np.full((2, 3, 5, 7), 1e4, np.float32)  # exp would overflow
    loss_R, dy = model.loss(y, t, model.count(t))
    np.testing.assert_allclose(loss_R, math.log(7) / 2, rtol=1e-6)
    np.testing.assert_allclose(dy[..., 0], (1 / 7 - 1) / 30, rtol=1e-6)
    np.testing.assert_allclose(dy[..., 1:], (1 / 7) / 30, rtol=1e-6)


def test_the_squared_error_is_a_mean_over_elements():
    model = MLP(MLPConfig((2, 3)))
    t = np.zeros((2, 4, 3), np.float32)
    y = np.full((2, 4, 3), 3, np.float32)
    loss_R, dy = model.loss(y, t, model.count(t))
    np.testing.assert_array_equal(loss_R, [4.5, 4.5])
    np.testing.assert_array_equal(dy, np.full((2, 4, 3), 6 / 24, np.float32))


# ------------------------------------------------------------------------------------- the layers


def test_no_token_sees_the_ones_after_it():
    model = GPT(DIGITS)
    params, x, _ = problem(model, 1, 2)
    y, _ = model.forward(params, x)
    for at in (1, 30, 63):
        other = x.copy()
        other[:, :, at:] = (other[:, :, at:] + 1) % DIGITS.vocab_size
        z, _ = model.forward(params, other)
        np.testing.assert_array_equal(y[:, :, :at], z[:, :, :at])
        assert np.all(np.any(y[:, :, at:] != z[:, :, at:], axis=-1))


def test_embedding_gradients_are_added_in_token_order():
    model = GPT(TINY)
    embedding = model.layers[0]
    _, grads = flat_views(model, 2)
    rng = np.random.default_rng(0)
    x = rng.integers(0, 5, (2, 6, 4))  # tokens 5 and 6 and position 4 do not occur
    dy = (rng.normal(size=(2, 6, 4, 6)) * 10.0 ** rng.integers(-4, 5, (2, 6, 4, 1))).astype("f4")
    assert embedding.backward({}, (x,), dy, grads) is None
    tok, pos = np.zeros((2, 7, 6), np.float32), np.zeros((2, 5, 6), np.float32)
    for r in range(2):
        for b in range(6):
            for t in range(4):
                tok[r, x[r, b, t]] += dy[r, b, t]
                pos[r, t] += dy[r, b, t]
    np.testing.assert_array_equal(grads["tok.weight"], tok)
    np.testing.assert_array_equal(grads["pos.weight"], pos)
    assert not tok[:, 5:].any()


def test_gelu_is_the_tanh_form_and_survives_extremes():
    u = np.concatenate([np.linspace(-6, 6, 97), [-1e4, -30, 0.0, 30, 1e4]])
    value, slope = model_module._gelu(u.copy())
    inner = [math.sqrt(2 / math.pi) * (v + 0.044715 * v**3) for v in u]
    np.testing.assert_allclose(
        value, [0.5 * v * (1 + math.tanh(z)) for v, z in zip(u, inner, strict=True)], atol=1e-15
    )
    h = 1e-6
    difference = (model_module._gelu(u + h)[0] - model_module._gelu(u - h)[0]) / (2 * h)
    np.testing.assert_allclose(slope[:97], difference[:97], atol=1e-8)
    np.testing.assert_array_equal(slope[-5:], [0, 0, 0.5, 1, 1])
    single, single_slope = model_module._gelu(u.astype(np.float32))
    assert single.dtype == single_slope.dtype == np.float32
    assert np.isfinite(single).all()
    assert np.isfinite(single_slope).all()


# ------------------------------------------------------------------------------------- the models


def test_a_gpt_is_its_layers_in_order():
    model = GPT(TINY)
    assert [layer.name for layer in model.layers] == [
        "embed", "layers.0.attn", "layers.0.mlp", "layers.1.attn", "layers.1.mlp", "head",
    ]  # fmt: skip
    assert dict(model.blocks) == {
        "embed": ("embed",),
        "layers.0": ("layers.0.attn", "layers.0.mlp"),
        "layers.1": ("layers.1.attn", "layers.1.mlp"),
        "head": ("head",),
    }
    assert list(model.shapes)[:4] == [
        "tok.weight", "pos.weight", "layers.0.ln1.weight", "layers.0.ln1.bias",
    ]  # fmt: skip
    assert list(model.shapes)[-1] == "head.weight"


@every_model
def test_blocks_hold_every_layer_once(model):
    grouped = [name for _, names in model.blocks for name in names]
    assert grouped == [layer.name for layer in model.layers]
    assert len(model.shapes) == sum(len(layer.shapes) for layer in model.layers)


def test_sizes_of_the_presets():
    for config, numel, block_share in ((DIGITS, 62_304, 0.4538), (LESSON, 404_480, 0.1236)):
        model = GPT(config)
        assert model.numel == numel
        d, v, t = config.width, config.vocab_size, config.seq_len
        block = 12 * d * d + 13 * d
        assert numel == config.blocks * block + 2 * v * d + t * d + 2 * d
        assert block / numel == pytest.approx(block_share, abs=1e-4)


@every_model
def test_initial_parameters_depend_on_the_seed_only(model):
    first, again, other = model.init(3), model.init(3), model.init(4)
    assert {name: value.shape for name, value in first.items()} == model.shapes
    for name, value in first.items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, again[name])
        if name.endswith(".bias"):
            assert not value.any()
        elif value.ndim == 1:
            assert (value == 1).all()
        else:
            assert (value != other[name]).any()


def test_initial_weights_have_gpt2s_spread():
    params = GPT(LESSON).init(0)
    for name, value in params.items():
        if value.ndim == 2:
            residual = name.endswith((".proj.weight", ".fc2.weight"))
            wanted = 0.02 / math.sqrt(16) if residual else 0.02
            # The standard deviation of n normal numbers is off by 1 / sqrt(2 n).
            assert value.std() == pytest.approx(wanted, rel=5 / math.sqrt(2 * value.size))


# ----------------------------------------------------------------------------------------- errors


def test_tokens_that_do_not_fit_are_refused():
    model = GPT(TINY)
    params, _, _ = problem(model, 1, 1)
    long = np.zeros((1, 1, 6), np.int64)
    with pytest.raises(UsageError, match="6 tokens in a sequence, but the model has 5 positions"):
        model.forward(params, long)
    for token in (7, -1):
        with pytest.raises(UsageError, match=f"tokens from .*{token}.*vocabulary has 7"):
            model.forward(params, np.array([[[0, token]]])) if token > 0 else model.forward(
                params, np.array([[[token, 0]]])
            )


@pytest.mark.parametrize("field", ["vocab_size", "seq_len", "width", "heads", "blocks"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "4", True, None])
def test_a_gpt_of_impossible_size_is_refused(field, value):
    sizes = {"vocab_size": 7, "seq_len": 5, "width": 6, "heads": 3, "blocks": 2}
    with pytest.raises(UsageError, match=f"{field} must be an integer of at least 1"):
        GPTConfig(**{**sizes, field: value})


def test_heads_must_divide_the_width():
    with pytest.raises(UsageError, match="width 6 is not a multiple of heads 4"):
        GPTConfig(vocab_size=7, seq_len=5, width=6, heads=4, blocks=2)


@pytest.mark.parametrize("sizes", [(), (3,), (3, 0), (3, 4.5)])
def test_an_mlp_of_impossible_size_is_refused(sizes):
    with pytest.raises(UsageError, match="sizes"):
        MLPConfig(sizes)


def test_parameter_names_are_plain():
    allowed = set(string.ascii_lowercase + string.digits + "._")
    for config in (TINY, LESSON):
        assert all(set(name) <= allowed for name in GPT(config).shapes)
