"""Where the boxes of a tree stand: in layers, tidy, nothing over anything."""

from collections.abc import Sequence


def centres(
  parents: Sequence[int], sizes: Sequence[float], gap: float
) -> list[float]:
  """Places the nodes of each layer of a tree beside one another.

  Subtrees stand as close as their outlines allow, in the order of the nodes,
  and a parent over the middle between its first and its last child. So no two
  nodes of a layer come closer than `gap`, and no two edges cross.

  Args:
    parents: the parent of each node, -1 for the root, which comes first; a
      parent before its children.
    sizes: what each node takes along its layer.
    gap: the least distance between two nodes of a layer.

  Returns:
    The centre of each node along its layer, from 0 up.

  Source: Reingold and Tilford 1981, "Tidier drawings of trees".
  """
  count = len(parents)
  children: list[list[int]] = [[] for _ in range(count)]
  for node in range(1, count):
    children[parents[node]].append(node)
  offset = [0.0] * count  # from the parent's centre
  # The lowest and highest edge in each layer from the node's own one down,
  # measured from the node's centre.
  outlines: list[list[tuple[float, float]]] = [[] for _ in range(count)]
  for node in reversed(range(count)):
    below: list[tuple[float, float]] = []
    for child in children[node]:
      outline = outlines[child]
      shift = max(
        (b[1] + gap - o[0] for b, o in zip(below, outline, strict=False)),
        default=0.0,
      )
      offset[child] = shift
      moved = [(low + shift, high + shift) for low, high in outline]
      common = min(len(below), len(moved))
      below = [
        *((below[i][0], moved[i][1]) for i in range(common)),
        *below[common:],
        *moved[common:],
      ]
      outlines[child] = []
    if children[node]:
      middle = offset[children[node][-1]] / 2
      for child in children[node]:
        offset[child] -= middle
      below = [(low - middle, high - middle) for low, high in below]
    outlines[node] = [(-sizes[node] / 2, sizes[node] / 2), *below]
  places = [-min(low for low, _ in outlines[0])]
  for node in range(1, count):
    places.append(places[parents[node]] + offset[node])
  return places
