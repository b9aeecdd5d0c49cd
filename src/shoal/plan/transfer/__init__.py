"""Plans of moves: from one layout to another, on the same, fewer or other devices.

* `plan`: the plan of a move, by whichever way moves less.
* `regions` (with `checks`): the boxes that must move, exactly, with their holders and needers.
* `bounds` (with `places`): the least bytes that any plan must move, and the least memory.
* `collective` (with `blocks`): the cheapest collectives, and their `move_steps`.
* `point_to_point` (with `edge_colours`): single sends in rounds, at the bound;
  `permutes`: the same as permutes of equal blocks, which one program can run.

Knows layouts and hardware; does not know how a plan is carried out.
"""
