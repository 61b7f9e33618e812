"""A target in exact integer arithmetic, and an oracle for it in NumPy.

Each next token is a hash of everything before it, read through the cache: a
row that is committed wrongly, or not at all, changes all that follows. Sums
of small integers are exact in float32, so a wide and a narrow pass agree to
the bit and no near tie excuses a difference. It also compiles in a second.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import decoding, memory, pallas_kernels, sampling

V = 31
WIDTH = 9  # of prompts, so that one program serves all of them


def _code(token, position):
  return (token * token * 31 + token * (17 + 7 * position) + position) % 1021


def _hash(total, token, salt, xp):
  """Noise in [0, 997) of uint32 arrays."""
  x = total * xp.uint32(2654435761) + token * xp.uint32(40503) + salt
  x = x ^ (x >> xp.uint32(15))
  x = x * xp.uint32(2246822519)
  x = x ^ (x >> xp.uint32(13))
  return x % xp.uint32(997)


def _forward(params, tokens, positions, parents, view):
  code = _code(jnp.clip(tokens, 0, V - 1), positions).astype(jnp.float32)
  mask = pallas_kernels.ancestor_mask(parents)
  size = view.pages[0].shape[2]
  slot = jnp.arange(view.block_table.shape[1] * size, dtype=jnp.int32)
  page = view.block_table[:, slot // size]
  prefix = view.pages[0].at[page, 0, slot[None] % size, 0].get(mode="clip")
  prefix = jnp.where(slot[None] < view.length[:, None], prefix, 0.0)
  total = prefix.sum(-1)[:, None] + jnp.where(mask, code[:, None], 0.0).sum(-1)
  hidden = jnp.stack([total, positions.astype(jnp.float32)], axis=-1)
  wide = tokens.shape[1] > 1
  hidden = hidden + jnp.where(wide, params["when_wide"], 0.0)
  block_kv = jnp.stack([code, code], axis=-1)[:, :, None]
  return decoding.TargetOutput(
    hidden, hidden, (block_kv.astype(view.pages[0].dtype),)
  )


def _score(params, hidden):
  total = hidden[..., :1].astype(jnp.int32).astype(jnp.uint32)
  token = jnp.arange(V, dtype=jnp.uint32).reshape(*([1] * total.ndim)[1:], V)
  noise = _hash(total, token, params["salt"], jnp).astype(jnp.float32)
  # The token breaks ties; all of it is exact in float32.
  logits = (noise * V + token.astype(jnp.float32)) * params["scale"]
  after = hidden[..., 1].astype(jnp.int32) + 1
  forced = params["force"].at[after].get(mode="fill", fill_value=-1)
  logits += jnp.where(
    forced[..., None] == token.astype(jnp.int32), 100.0, 0.0
  ).astype(jnp.float32)
  logits = jnp.where(jnp.isnan(hidden[..., :1]), jnp.nan, logits)
  return decoding.Scores(logits)


@functools.lru_cache
def _cache(page_size, num_pages, max_len):
  shape = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1}

  def init_cache(batch):
    if page_size is None:
      return memory.DenseKVCache.create(batch=batch, max_len=max_len, **shape)
    return memory.PagedKVCache.create(
      batch=batch,
      max_len=max_len,
      page_size=page_size,
      num_pages=num_pages,
      **shape,
    )

  return init_cache


class Programs(NamedTuple):
  """Compiled once for each decoder."""

  init: Any
  step: Any
  empty: Any
  admit: Any
  prefill: Any
  preempt: Any
  release: Any


@functools.cache
def _programs(decoder):
  return Programs(
    init=jax.jit(decoder.init),
    step=jax.jit(decoder.step),
    empty=jax.jit(decoder.empty, static_argnums=1),
    admit=jax.jit(decoder.admit),
    prefill=jax.jit(decoder.prefill, static_argnums=3),
    preempt=jax.jit(decoder.preempt),
    release=jax.jit(decoder.release),
  )


class Toy:
  """The target, its caches, its compiled programs and its oracle."""

  V = V
  width = WIDTH
  target = decoding.TargetFn(_forward, _score)
  prompts = ((1, 2, 3), (4, 5, 6, 7, 8, 9, 10, 11, 12), (30, 0), (0, 0, 0, 5))

  def __init__(self, max_len=40):
    self.max_len = max_len

  def long(self):
    """The same with room for fifty rounds of seven tokens."""
    return Toy(364)

  def params(self, draft=(), *, force=None, salt=0, scale=None, when_wide=0.0):
    forced = np.full((self.max_len + 1,), -1, np.int32)
    for position, token in (force or {}).items():
      forced[position] = token
    target = {
      # Logits from 0 to 6.
      "scale": jnp.float32(6 / (997 * V) if scale is None else scale),
      "salt": jnp.uint32(salt),
      "force": jnp.asarray(forced),
      "when_wide": jnp.float32(when_wide),
    }
    return decoding.DecoderParams(target, draft)

  def init_cache(self, page_size=4, num_pages=None, max_len=None):
    return _cache(page_size, num_pages, max_len or self.max_len)

  def decoder(self, draft=None, *, chunk=4, **cache):
    return decoding.speculative(
      self.target,
      decoding.root_only() if draft is None else draft,
      self.init_cache(**cache),
      max_len=self.max_len,
      chunk=chunk,
    )

  def programs(self, decoder):
    return _programs(decoder)

  def init(
    self,
    decoder,
    params,
    prompts=prompts,
    *,
    sampling_=None,
    max_new_tokens=16,
    stop_ids=(),
  ):
    """A state after prefill; `stop_ids` for all rows, or [B, 16]."""
    batch = len(prompts)
    tokens = np.zeros((batch, WIDTH), np.int32)
    for row, prompt in enumerate(prompts):
      tokens[row, : len(prompt)] = prompt
    limits = np.broadcast_to(np.asarray(max_new_tokens, np.int32), (batch,))
    if not isinstance(stop_ids, np.ndarray):
      stop_ids = np.stack([decoding.stop_ids_row(stop_ids)] * batch)
    return _programs(decoder).init(
      params,
      jnp.asarray(tokens),
      jnp.asarray([len(prompt) for prompt in prompts], dtype=jnp.int32),
      sampling=sampling_ or sampling.make_sampling(batch),
      max_new_tokens=jnp.asarray(limits),
      stop_ids=jnp.asarray(stop_ids),
    )

  def run(self, decoder, params, prompts=prompts, **request):
    """Texts and the last state, by as many steps as it takes."""
    state = self.init(decoder, params, prompts, **request)
    while np.asarray(state.live).any():
      state, _ = _programs(decoder).step(params, state)
    return self.texts(state), state

  @staticmethod
  def trace(decoder, params, state, rounds):
    """The state after so many steps, and what each of them did, stacked."""
    done = []
    for _ in range(rounds):
      state, one = _programs(decoder).step(params, state)
      done.append(jax.tree.map(np.asarray, one))
    return state, jax.tree.map(lambda *x: np.stack(x), *done)

  @staticmethod
  def texts(state):
    tokens = np.asarray(state.tokens)
    begin, end = np.asarray(state.prompt_length), np.asarray(state.length)
    return [
      tokens[row, begin[row] : end[row]].tolist() for row in range(len(tokens))
    ]

  @staticmethod
  def ranks(text, salt=0):
    """Integers [V] in the order of the logits after a text, in NumPy.

    The logits are `scale` times them.
    """
    token = np.arange(V, dtype=np.uint32)
    total = np.uint32(sum(_code(t, i) for i, t in enumerate(text)))
    with np.errstate(over="ignore"):
      noise = _hash(total, token, np.uint32(salt), np).astype(np.int64)
    return noise * V + token

  def greedy(self, prompt, count, *, force=None, salt=0):
    """Plain greedy decoding, one token at a time, in NumPy."""
    text = list(prompt)
    while len(text) < len(prompt) + count:
      forced = (force or {}).get(len(text), -1)
      best = int(np.argmax(self.ranks(text, salt)))
      text.append(best if forced < 0 else forced)
    return text[len(prompt) :]

  def script(self, texts, prompts=prompts, shift=0):
    """Parameters of `testing.scripted_draft` that play `texts`."""
    script = np.zeros((len(prompts), self.max_len), np.int32)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
      whole = [*prompt, *text][: self.max_len]
      script[row, : len(whole)] = [(t + shift) % V for t in whole]
    return jnp.asarray(script)


@pytest.fixture(scope="session")
def toy():
  return Toy()


class PairHeads(NamedTuple):
  """Heads that see a token and the one before it, and their oracle.

  Their state counts what was committed; `asked` lists how many nodes each call
  was about, as it is traced.
  """

  fn: decoding.HeadsFn
  params: Any
  asked: list[int]

  def logits(self, path):
    """[W] float32 after a path of tokens, the root's first, in NumPy."""
    own = np.asarray(self.params["own"])[path[-1]]
    if len(path) == 1:
      return own
    return own + np.asarray(self.params["before"])[path[-2]]

  def token(self, guess):
    ids = self.params.get("ids")
    return int(guess if ids is None else ids[guess])


def _pair_heads(depth, vocab_size=V, *, trimmed=False, seed=0, scale=1.0):
  asked: list[int] = []

  def observe(params, state, observation):
    return state.at[observation.rows].add(observation.count)

  def begin(params, state, pending):
    asked.append(1)
    return pending[:, None], params["own"][pending][:, None]

  def extend(params, state, carry, tokens, parents):
    asked.append(tokens.shape[1])
    above = jnp.take_along_axis(carry, parents, axis=1)
    logits = params["own"][tokens] + params["before"][above]
    return jnp.concatenate([carry, tokens], axis=1), logits

  def untrained(*_):
    raise AssertionError("nobody trains here")

  fn = decoding.HeadsFn(
    init=lambda params, batch: jnp.zeros((batch,), jnp.int32),
    observe=observe,
    release=lambda state, mask: jnp.where(mask, 0, state),
    begin=begin,
    extend=extend,
    unroll=untrained,
    score=untrained,
    token_ids=lambda params: params.get("ids"),
    depth=depth,
    vocab_size=vocab_size,
    feature_size=2,
  )
  rng = np.random.default_rng(seed)
  params = {
    name: jnp.asarray(scale * rng.standard_normal((V, vocab_size)), jnp.float32)
    for name in ("own", "before")
  }
  if trimmed:
    ids = rng.choice(V, vocab_size, replace=False).astype(np.int32)
    params["ids"] = jnp.asarray(ids)
  return PairHeads(fn, params, asked)


@pytest.fixture(scope="session")
def pair_heads():
  """Makes `PairHeads(depth, vocab_size, trimmed=, seed=, scale=)`."""
  return _pair_heads
