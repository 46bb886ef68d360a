"""The mover: new addresses inside one space, and the transfers that bring buffers there.

`holes` and `arrange` say what moves where; `order`, `cycles` and `cost` say how; `relocation` makes
the step. Comes in: the planner's picture of one space. Must not know tasks, values or victims.
"""
