"""Random trees of everything that travels, and their bits."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

SMALL = [t for t in vars(ml_dtypes).values() if isinstance(t, type) and issubclass(t, np.generic)]
DTYPES = [
    *map(np.dtype, ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]),
    *map(np.dtype, ["c8", "c16", *SMALL]),
]
KEYS = st.sampled_from(["threefry2x32", "rbg", "unsafe_rbg"])


def shapes():
    return st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def arrays(draw, dtypes=None, dims=None):
    """Arrays of any bits, also ones that do not lie together in memory."""
    dtype = draw(st.sampled_from(DTYPES)) if dtypes is None else draw(dtypes)
    shape = draw(shapes()) if dims is None else draw(dims)
    if dtype.kind == "b":
        size = int(np.prod(shape))
        bools = draw(st.lists(st.booleans(), min_size=size, max_size=size))
        return np.array(bools, bool).reshape(shape)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    data = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    array = np.frombuffer(data, dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array[..., ::-1] if array.ndim else array


@st.composite
def keys(draw):
    key = jax.random.key(draw(st.integers(0, 99)), impl=draw(KEYS))
    shape = draw(st.sampled_from([(), (2,), (2, 1)]))
    return jax.random.split(key, shape) if shape else key


def leaves():
    numbers = st.booleans() | st.integers() | st.integers(-(1 << 200), 1 << 200)
    numbers |= st.floats() | st.complex_numbers()
    texts = st.binary(max_size=9) | st.text(st.characters(), max_size=9)
    texts |= st.sampled_from(["\ud800", "a\udfff\ud83d\ude00", "\0", "é"])
    scalars = arrays(dims=st.just(())).map(lambda array: array[()])
    return st.none() | numbers | texts | scalars | arrays() | keys()


def trees():
    def nodes(inner):
        dicts = st.dictionaries(st.text(max_size=3), inner, max_size=3)
        return st.lists(inner, max_size=3) | st.tuples(inner, inner) | dicts

    return st.recursive(leaves(), nodes, max_leaves=8)


def bits_of(tree):
    """What must be equal of two trees: paths, types, dtypes, shapes and bits."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda value: value is None)
    return [(jax.tree_util.keystr(path), *_bits(value)) for path, value in paths]


def _bits(value):
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        words = np.asarray(jax.random.key_data(value))
        return "key", str(jax.random.key_impl(value)), words.shape, words.tobytes()
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        kind = "scalar" if isinstance(value, np.generic) else "array"
        return kind, np.asarray(value).dtype, np.shape(value), np.asarray(value).tobytes()
    if isinstance(value, float | complex):
        return type(value), np.array(value).tobytes()
    return type(value), value


def unreduced():
    """Return an array of which two devices hold one term each."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    rows = jax.device_put(np.ones((3, 2), np.float32), NamedSharding(mesh, P(None, "x")))
    where = P(None, None, unreduced={"x"})
    with jax.set_mesh(mesh):
        return jax.jit(lambda a: jnp.einsum("ik,jk->ij", a, a, out_sharding=where))(rows)
