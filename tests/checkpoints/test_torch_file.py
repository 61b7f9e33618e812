"""PyTorch files without torch: what is read, and what is refused unrun."""

import io
import pathlib
import pickle
import struct
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

from ldjax.checkpoints import _torch_file

STORAGES = {
  "float32": "FloatStorage",
  "float16": "HalfStorage",
  "bfloat16": "BFloat16Storage",
  "int64": "LongStorage",
  "bool": "BoolStorage",
}


def name_of(module, name):
  return b"c" + f"{module}\n{name}\n".encode()


def number(value):
  return b"J" + struct.pack("<i", value)


def text(value):
  return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def sizes(values):
  return b"(" + b"".join(map(number, values)) + b"t"


ORDERED = name_of("collections", "OrderedDict") + b")R"


def tensor(key, dtype, size, shape, strides, offset=0):
  """The pickle of one tensor, opcode by opcode, as torch.save writes it."""
  storage = (
    b"("
    + text("storage")
    + name_of("torch", STORAGES[dtype])
    + text(key)
    + text("cpu")
    + number(size)
    + b"tQ"
  )
  return (
    name_of("torch._utils", "_rebuild_tensor_v2")
    + b"("
    + storage
    + number(offset)
    + sizes(shape)
    + sizes(strides)
    + b"\x89"
    + ORDERED
    + b"tR"
  )


def table(entries):
  items = b"".join(text(name) + value for name, value in entries.items())
  return b"\x80\x02" + ORDERED + b"(" + items + b"u."


def contiguous(shape):
  steps = [1]
  for size in reversed(shape[1:]):
    steps.append(steps[-1] * size)
  return tuple(reversed(steps)) if shape else ()


def write(path, arrays, *, program=None, **members):
  """What torch.save writes of a dict of arrays."""
  entries, data = {}, {}
  for number_, (name, array) in enumerate(arrays.items()):
    key = str(number_)
    entries[name] = tensor(
      key, array.dtype.name, array.size, array.shape, contiguous(array.shape)
    )
    data[f"data/{key}"] = array.tobytes()
  members = {
    "data.pkl": table(entries) if program is None else program,
    "byteorder": b"little",
    **data,
    "version": b"3\n",
    **members,
  }
  with zipfile.ZipFile(path, "w") as archive:
    for name, content in members.items():
      archive.writestr(f"{path.stem}/{name}", content)


def read(path, integers=()):
  with _torch_file.Reader() as reader:
    return {t.name: t.read() for t in reader.tensors(path, integers)}


@pytest.fixture
def path(tmp_path):
  return tmp_path / "heads.pt"


def some(seed=0):
  rng = np.random.default_rng(seed)
  return {
    "0.0.linear.weight": rng.normal(size=(3, 4)).astype(np.float32),
    "half": rng.normal(size=(5,)).astype(np.float16),
    "brain": np.asarray(jnp.arange(6, dtype=jnp.bfloat16)).reshape(2, 3),
    "scalar": np.float32(3.5).reshape(()),
    "none": np.zeros((0, 4), np.float32),
    "d2t": np.array([0, 3, 9]),
    "t2d": np.array([True, False]),
  }


class TestRead:
  def test_every_type_and_shape(self, path):
    arrays = some()
    write(path, arrays)
    found = read(path, ("d2t", "t2d"))
    assert list(found) == list(arrays)
    for name, array in arrays.items():
      assert found[name].dtype == array.dtype
      np.testing.assert_array_equal(found[name], array)

  def test_views_of_one_storage(self, path):
    whole = np.arange(12, dtype=np.float32)
    entries = {
      "transposed": tensor("0", "float32", 12, (4, 3), (1, 4)),
      "part": tensor("0", "float32", 12, (2, 2), (4, 1), 5),
      "repeated": tensor("0", "float32", 12, (2, 3), (0, 1), 1),
    }
    write(path, {"x": whole}, program=table(entries))
    found = read(path)
    block = whole.reshape(3, 4)
    np.testing.assert_array_equal(found["transposed"], block.T)
    np.testing.assert_array_equal(found["part"], block[1:, 1:3])
    np.testing.assert_array_equal(found["repeated"], [[1, 2, 3]] * 2)

  def test_a_parameter(self, path):
    value = tensor("0", "float32", 2, (2,), (1,))
    program = table(
      {
        "w": name_of("torch._utils", "_rebuild_parameter")
        + b"("
        + value
        + b"\x88"
        + ORDERED
        + b"tR"
      }
    )
    write(path, {"x": np.ones(2, np.float32)}, program=program)
    np.testing.assert_array_equal(read(path)["w"], [1, 1])

  @pytest.mark.parametrize("protocol", [2, 4, 5])
  def test_of_torch_itself(self, path, protocol):
    torch = pytest.importorskip("torch")
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3)}
    tensors = {name: torch.from_numpy(x.copy()) for name, x in arrays.items()}
    torch.save(tensors, path, pickle_protocol=protocol)
    np.testing.assert_array_equal(read(path)["a"], arrays["a"])


class Evil:
  def __reduce__(self):
    return pathlib.Path.touch, (pathlib.Path("harmed"),)


class TestRefused:
  @pytest.mark.parametrize("protocol", range(6))
  def test_foreign_names_are_not_run(self, path, monkeypatch, protocol):
    monkeypatch.chdir(path.parent)
    program = pickle.dumps({"w": Evil()}, protocol)
    write(path, {}, program=program)
    with pytest.raises(ValueError, match=r"heads.pt: .*nothing of it was run"):
      read(path)
    assert not pathlib.Path("harmed").exists()

  @pytest.mark.parametrize(
    "program",
    [
      b"cos\nsystem\n(X\x04\x00\x00\x00trueR.",
      b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R.",
      b"\x80\x02ctorch\nload\n.",
      b"\x80\x04\x8c\x07ldjax.x\x8c\x01y\x93.",
    ],
  )
  def test_names_by_hand(self, path, program):
    write(path, {}, program=program)
    with pytest.raises(ValueError, match="which no table of tensors needs"):
      read(path)

  @pytest.mark.parametrize(
    "entry",
    [
      tensor("0", "float32", 12, (4, 4), (4, 1)),
      tensor("0", "float32", 12, (3, 4), (4, 1), 1),
      tensor("0", "float32", 12, (3, 4), (4, -1)),
      tensor("0", "float32", 12, (3, 4), (4,)),
      tensor("0", "float32", -1, (3, 4), (4, 1)),
      tensor("0", "float32", 12, (-3, 4), (4, 1)),
      tensor("0", "float32", 12, (3, 4), (4, 1), -1),
      number(3),
      b"]",
    ],
  )
  def test_a_tensor_beyond_its_storage(self, path, entry):
    write(path, {"x": np.zeros(12, np.float32)}, program=table({"w": entry}))
    with pytest.raises(ValueError, match=r"heads\.pt"):
      read(path)

  def test_a_storage_that_says_another_size(self, path):
    entry = tensor("0", "float32", 20, (20,), (1,))
    write(path, {"x": np.zeros(12, np.float32)}, program=table({"w": entry}))
    with pytest.raises(ValueError, match="data/0 holds 48 bytes; 20 numbers"):
      read(path)
    entry = tensor("../../x", "float32", 12, (12,), (1,))
    write(path, {"x": np.zeros(12, np.float32)}, program=table({"w": entry}))
    with pytest.raises(ValueError, match=r"has no heads/data/\.\./\.\./x"):
      read(path)

  def test_a_bomb(self, path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
      entry = tensor("0", "float32", 1 << 26, (1 << 26,), (1,))
      archive.writestr("a/data.pkl", table({"w": entry}), zipfile.ZIP_STORED)
      archive.writestr("a/data/0", bytes(1 << 28))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(ValueError, match="a/data/0 is compressed"):
      read(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
      archive.writestr("a/data.pkl", bytes(1 << 24))
    with pytest.raises(ValueError, match=r"a/data.pkl is compressed"):
      read(path)

  def test_other_types(self, path):
    write(path, {"w": np.array([1])})
    with pytest.raises(ValueError, match="'w' is of type int64; only bfloat16"):
      read(path)
    write(path, {"d2t": np.zeros(2, np.float32)})
    with pytest.raises(ValueError, match="'d2t' is of type float32; only bool"):
      read(path, ("d2t",))

  def test_other_files(self, path):
    path.write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")
    with pytest.raises(ValueError, match=r"older than PyTorch 1\.6"):
      read(path)
    with zipfile.ZipFile(path, "w") as archive:
      archive.writestr("a/b.txt", "hello")
    with pytest.raises(ValueError, match=r"0 members named data\.pkl"):
      read(path)
    write(path, {}, program=pickle.dumps([1], 2))
    with pytest.raises(ValueError, match="holds a list, not a table"):
      read(path)
    write(path, {}, program=pickle.dumps({"w": 3}, 2))
    with pytest.raises(ValueError, match="entry 'w' is not a tensor"):
      read(path)
    write(path, some(), byteorder=b"big")
    with pytest.raises(ValueError, match="byteorder is 'big'"):
      read(path)

  def test_cut_and_flipped(self, path):
    arrays = {k: v for k, v in some().items() if v.dtype.kind != "i"}
    arrays.pop("t2d")
    write(path, arrays)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for trial in range(300):
      data = bytearray(whole)
      if trial % 3:
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
      else:
        data = data[: rng.integers(len(data))]
      path.write_bytes(bytes(data))
      try:
        found = read(path)
      except ValueError as error:
        assert "heads.pt" in str(error)
        continue
      for name, array in found.items():
        if name in arrays:
          assert array.shape == arrays[name].shape or array.size < 30


def test_the_pickles_here_are_pickles():
  names = []

  class Names(pickle.Unpickler):
    def find_class(self, module, name):
      names.append((module, name))
      return dict if name == "OrderedDict" else lambda *_: None

    def persistent_load(self, pid):
      return pid

  entry = tensor("0", "float32", 12, (3, 4), (4, 1))
  assert Names(io.BytesIO(table({"w": entry}))).load() == {"w": None}
  assert ("torch", "FloatStorage") in names
