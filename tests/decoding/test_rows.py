"""Rows come and go while the others run; pages are given back and suffice."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ldjax import decoding, sampling, testing

Status = decoding.Status
ROWS = 4


@dataclasses.dataclass
class Request:
  prompt: list[int]
  limit: int
  stops: tuple[int, ...] = ()
  setting: dict | None = None

  def want(self, toy):
    """The text that it gets when alone, by the NumPy oracle (greedy)."""
    text = toy.greedy(
      self.prompt, min(self.limit, toy.max_len - len(self.prompt))
    )
    for index, token in enumerate(text):
      if token in self.stops:
        return text[: index + 1]
    return text


class Host:
  """The smallest loop that serves rows; every memory decision is here."""

  def __init__(self, toy, decoder, params, state=None):
    self.toy, self.params = toy, params
    self.programs = toy.programs(decoder)
    self.state = state or self.programs.empty(params, ROWS)

  def admit(self, row, request):
    prompt = np.zeros((self.toy.width,), np.int32)
    prompt[: len(request.prompt)] = request.prompt
    setting = sampling.make_sampling(1, **(request.setting or {}))
    self.state = self.programs.admit(
      self.state,
      jnp.int32(row),
      jnp.asarray(prompt),
      jnp.int32(len(request.prompt)),
      jax.tree.map(lambda x: x[0], setting),
      jnp.int32(request.limit),
      jnp.asarray(decoding.stop_ids_row(request.stops)),
    )

  def prefill(self, row):
    """One chunk; returns what was emitted."""
    self.state, one = self.programs.prefill(
      self.params, self.state, jnp.array([row]), 4
    )
    return one

  def step(self):
    self.state, one = self.programs.step(self.params, self.state)
    return one

  def release(self, *rows):
    mask = np.isin(np.arange(ROWS), rows)
    self.state = self.programs.release(self.state, jnp.asarray(mask))

  def preempt(self, *rows):
    mask = np.isin(np.arange(ROWS), rows)
    self.state = self.programs.preempt(self.state, jnp.asarray(mask))

  def text(self, row):
    return self.toy.texts(self.state)[row]

  @property
  def status(self):
    return self.state.status.tolist()

  @property
  def free(self):
    return int(self.state.cache.pool.num_free)

  def finish(self, row):
    """Runs one row to its end; returns its text."""
    for _ in range(80):
      if self.status[row] == Status.PREFILLING:
        self.prefill(row)
      elif self.status[row] == Status.RUNNING:
        self.step()
    return self.text(row)

  def check_pages(self):
    """free ⊎ owned = all pages, and nobody holds more than needed."""
    cache = jax.tree.map(np.asarray, self.state.cache)
    held = cache.block_table[cache.block_table < cache.pool.num_pages]
    assert len(set(held.tolist())) == len(held)
    assert np.flatnonzero(cache.pool.references).tolist() == sorted(held)
    size = cache.pages[0].shape[2]
    assert len(held) == sum(-(-n // size) for n in cache.length.tolist())


@pytest.fixture(scope="module")
def decoder(toy):
  return toy.decoder(testing.random_tree_draft(12, 4, toy.V))


@pytest.fixture(scope="module")
def tight(toy):
  """13 pages of 4, where four whole rows would take 40."""
  return toy.decoder(testing.random_tree_draft(12, 4, toy.V), num_pages=13)


def _request(rng, toy):
  return Request(
    prompt=rng.integers(0, toy.V, rng.integers(1, toy.width + 1)).tolist(),
    limit=int(rng.integers(0, 30)),
    stops=tuple(rng.integers(0, toy.V, rng.integers(0, 3)).tolist()),
  )


@pytest.mark.slow
def test_a_hundred_requests_leave_no_trace(toy, decoder):
  """Any schedule gives the texts of solo runs and gives all pages back."""
  rng = np.random.default_rng(0)
  host = Host(toy, decoder, toy.params())
  total = host.free
  waiting = [_request(rng, toy) for _ in range(100)]
  in_row, ended = {}, {Status.STOPPED: 0, Status.LENGTH: 0, "aborted": 0}
  for _ in range(4000):
    if not (waiting or in_row):
      break
    free_rows = [r for r in range(ROWS) if r not in in_row]
    if waiting and free_rows and rng.random() < 0.7:
      row = int(rng.choice(free_rows))
      assert host.status[row] == Status.FREE
      in_row[row] = waiting.pop()
      host.admit(row, in_row[row])
    prefilling = [r for r in in_row if host.status[r] == Status.PREFILLING]
    if prefilling:
      host.prefill(int(rng.choice(prefilling)))
    host.step()
    if rng.random() < 0.05:
      host.preempt(int(rng.integers(ROWS)))
    for row, request in list(in_row.items()):
      status = host.status[row]
      abort = rng.random() < 0.01
      if status in (Status.STOPPED, Status.LENGTH):
        assert host.text(row) == request.want(toy)
      elif abort:
        status = "aborted"
        text = host.text(row)
        assert text == request.want(toy)[: len(text)]
      else:
        continue
      ended[status] += 1
      host.release(row)
      del in_row[row]
    host.check_pages()
  assert sum(ended.values()) == 100 and min(ended.values()) > 3, ended
  assert host.free == total
  assert host.status == [Status.FREE] * ROWS


def test_sampled_row_means_the_same_in_any_row_and_company(toy, decoder):
  request = Request([3, 1, 4], 20, (), {"temperature": 1.0, "seed": 7})
  alone = Host(toy, decoder, toy.params())
  alone.admit(2, request)
  want = alone.finish(2)
  assert want != toy.greedy([3, 1, 4], 20)
  crowd = Host(toy, decoder, toy.params())
  for row, other in ((0, Request([9] * 9, 25)), (3, Request([1], 3))):
    crowd.admit(row, other)
    crowd.prefill(row)
  crowd.step()
  crowd.admit(1, request)
  assert crowd.finish(1) == want


def test_short_after_long_in_the_same_slot(toy, decoder):
  host = Host(toy, decoder, toy.params())
  short = Request([5, 5], 6)
  host.admit(1, Request(list(range(9)), 99))
  assert len(host.finish(1)) == 31 and host.status[1] == Status.LENGTH
  host.release(1)
  host.admit(1, short)
  assert host.finish(1) == short.want(toy)
  fresh = Host(toy, decoder, toy.params())
  fresh.admit(1, short)
  fresh.finish(1)
  for name in ("length", "status", "rounds", "limit", "tokens", "stop_ids"):
    np.testing.assert_array_equal(
      getattr(host.state, name), getattr(fresh.state, name)
    )
  host.release(1)
  assert host.free == host.state.cache.pool.num_pages


@pytest.mark.parametrize("when", [0, 1, 4])
def test_preempted_row_reads_its_text_again(toy, decoder, when):
  host = Host(toy, decoder, toy.params())
  one, other = Request([1, 2, 3, 4, 5, 6, 7], 24), Request([8], 24)
  host.admit(0, one)
  host.admit(3, other)
  for row in (0, 0, 3):
    host.prefill(row)
  for _ in range(when):
    host.step()
  text, free = host.text(0), host.free
  host.preempt(0)
  assert host.status[0] == Status.PREFILLING and host.free > free
  assert host.text(0) == text == one.want(toy)[: len(text)]
  assert host.state.cache.length[0] == 0
  host.step()  # the other row goes on meanwhile
  assert host.text(0) == text
  host.check_pages()
  assert host.finish(0) == one.want(toy)
  assert host.finish(3) == other.want(toy)


def test_preempt_leaves_ended_and_empty_rows(toy, decoder):
  host = Host(toy, decoder, toy.params())
  host.admit(0, Request([1, 2], 2))
  text = host.finish(0)
  before = jax.tree.map(np.asarray, host.state)
  host.preempt(0, 1)
  jax.tree.map(np.testing.assert_array_equal, before, host.state)
  assert host.text(0) == text


def test_prompt_in_chunks(toy, decoder):
  # Only the last chunk draws; rows that do not prefill are left alone.
  host = Host(toy, decoder, toy.params())
  request = Request(list(range(9)), 5)
  host.admit(2, request)
  counts = []
  for _ in range(3):
    counts.append(int(host.prefill(2).count[0]))
    assert host.prefill(0).count.tolist() == [0]
  assert counts == [0, 0, 1]
  before = jax.tree.map(np.asarray, host.state)
  assert host.prefill(2).count.tolist() == [0]
  jax.tree.map(np.testing.assert_array_equal, before, host.state)
  assert host.finish(2) == request.want(toy)


def _rows_of(state, row):
  cache = state.cache
  table = np.asarray(cache.block_table)[row]
  held = table[table < cache.pool.num_pages]
  return (
    [np.asarray(x)[row] for x in (state.tokens, state.length, state.status)]
    + [np.asarray(x)[row] for x in (cache.length, state.rounds)]
    + [held, np.asarray(cache.pages[0])[held]]
  )


def test_rows_without_pages_wait_unchanged(toy, tight):
  """Exhaustion hands out nothing, and a release lets the others go on."""
  requests = [Request([row + 1] * 5, 30) for row in range(ROWS)]
  host = Host(toy, tight, toy.params())
  for row, request in enumerate(requests):
    host.admit(row, request)
    host.prefill(row)
    host.prefill(row)
  ended, lacked, texts = [], 0, {}
  for _ in range(300):
    if len(ended) == ROWS:
      break
    before = [_rows_of(host.state, row) for row in range(ROWS)]
    one = host.step()
    assert one.needs_pages.tolist() == host.state.needs_pages.tolist()
    for row in range(ROWS):
      if one.needs_pages[row]:
        lacked += 1
        assert one.count[row] == 0 and (one.tokens[row] == -1).all()
        assert not host.state.live[row] and one.finite[row]
        for x, y in zip(before[row], _rows_of(host.state, row), strict=True):
          np.testing.assert_array_equal(x, y)
    host.check_pages()
    for row in set(range(ROWS)) - set(ended):
      if host.status[row] == Status.LENGTH:
        texts[row] = host.text(row)
        ended.append(row)
        host.release(row)
    running = [r for r in range(ROWS) if host.status[r] == Status.RUNNING]
    if running and not np.asarray(host.state.live).any():
      # Nobody can go on: the host takes a row back, which reads again later.
      host.preempt(running.pop())
    for row in range(ROWS):
      if host.status[row] == Status.PREFILLING and not running:
        while host.status[row] == Status.PREFILLING:
          host.prefill(row)
        break
  assert lacked > 3
  assert [texts[row] for row in range(ROWS)] == [r.want(toy) for r in requests]
  assert host.free == 13


def test_prefill_without_pages_can_be_repeated(toy, tight):
  host = Host(toy, tight, toy.params())
  for row in range(3):
    host.admit(row, Request([row] * 9, 30))
  for row in (0, 0, 0, 1, 1, 1):
    host.prefill(row)
  for _ in range(40):
    host.step()
  assert host.state.needs_pages.tolist() == [True, True, False, False]
  for _ in range(3):
    one = host.prefill(2)
  assert one.needs_pages.tolist() == [True] and one.count.tolist() == [0]
  assert host.status[2] == Status.PREFILLING
  # Looking at another row does not hide who lacks pages.
  waiting = host.state.needs_pages.tolist()
  host.state, _ = host.programs.prefill(
    host.params, host.state, jnp.array([0]), 4
  )
  assert host.state.needs_pages.tolist() == waiting
  host.release(0, 1)
  assert host.finish(2) == Request([2] * 9, 30).want(toy)


def test_decode_leaves_when_nobody_can_go_on(toy, tight):
  params = toy.params()
  prompts = [[row + 1] * 5 for row in range(ROWS)]
  texts, state = toy.run(tight, params, prompts, max_new_tokens=30)
  assert np.asarray(state.needs_pages).any()
  assert not np.asarray(state.live).any()
  for prompt, text in zip(prompts, texts, strict=True):
    assert text == toy.greedy(prompt, 30)[: len(text)]
  # A row too big for the whole pool says so instead of waiting in silence.
  assert int(state.cache.pool.num_free) < 2
