"""Making room in a space: what moves, what is dropped, who leaves, and why there is none."""

from stitch.planner.making_room.demand import RoomDemand
from stitch.planner.making_room.room import carry, make_room
from stitch.planner.making_room.victims import is_spare

__all__ = ["RoomDemand", "carry", "is_spare", "make_room"]
