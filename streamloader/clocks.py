"""What is known to have happened before what: vector clocks, and memory that remembers. Pure.

Every stream and every host thread is an actor, with a clock: how much of each actor's work is known
to be over by now, and at what virtual time. One `join`, an element-wise maximum, carries both along
every edge. Work happened before what comes next if that one's clock knows its tick.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from typing_extensions import override

__all__ = ["Access", "Clock", "Memory", "Point"]


class Point(NamedTuple):
    """One piece of an actor's work: its `tick`-th.

    Attributes:
        actor: A stream or a host thread; a message shows its `str`.
        tick: From 1.
    """

    actor: Any
    tick: int


@dataclass
class Clock:
    """What is over, as far as one actor can know, or as of one event.

    Attributes:
        ticks: How much of each actor's work.
        time: Virtual seconds.
    """

    ticks: dict[Any, int] = field(default_factory=dict)
    time: float = 0.0

    def join(self, *others: Clock) -> Clock:
        """Learns what the others know, and becomes as late as the latest. Returns itself."""
        for other in others:
            self.order(other)
            self.time = max(self.time, other.time)
        return self

    def order(self, other: Clock) -> None:
        """Learns what `other` knows, at no time: of an edge that nobody had to wait for."""
        for actor, tick in other.ticks.items():
            self.ticks[actor] = max(tick, self.ticks.get(actor, 0))

    def tick(self, actor: Any) -> Point:
        """One more piece of work of the actor whose clock this is."""
        self.ticks[actor] = self.ticks.get(actor, 0) + 1
        return Point(actor, self.ticks[actor])

    def knows(self, point: Point) -> bool:
        """Whether that work is over."""
        return self.ticks.get(point.actor, 0) >= point.tick


@dataclass(frozen=True)
class Access:
    """A piece of memory was read or written.

    Attributes:
        verb: What was done to it: "read" or "written".
        place: Where in the code.
        end: When it is over, in virtual seconds.
        host: As work of a host thread, None if it is none.
        stream: As work of a stream, None if it is none. An access can be both, until it is known
            where the memory is.
    """

    verb: str
    place: str
    end: float
    host: Point | None
    stream: Point | None

    def point(self, on_device: bool | None) -> Point:  # noqa: FBT001  # a place, not a switch
        """Whose work it was, given where the memory is."""
        points = (self.stream, self.host) if on_device else (self.host, self.stream)
        return next(point for point in points if point is not None)

    @override
    def __str__(self) -> str:
        return f"{self.verb} by {self.point(self.stream is not None).actor} at {self.place}"


@dataclass(eq=False)
class Memory:
    """One storage, and who did what to it last.

    Attributes:
        nbytes: Its size.
        made: Where in the code it was made, or first seen.
        own: The stream it was allocated on.
        on_device: Whether it is the device's. None while that is open: memory of no known origin is
            the host's until a kernel that works on the device's uses it too.
        users: Streams that were recorded on it.
        write: The last write.
        reads: The reads since then, the last of each actor.
    """

    nbytes: int
    made: str
    own: Any
    on_device: bool | None = None
    users: set[Any] = field(default_factory=set)
    write: Access | None = None
    reads: dict[tuple[Any, ...], Access] = field(default_factory=dict)

    def accesses(self) -> list[Access]:
        """The last write and the reads since then: all that went before lies before these."""
        return [*self.reads.values(), *([] if self.write is None else [self.write])]

    def conflicts(self, verb: str) -> list[Access]:
        """What must have happened before it is read, or written, now."""
        return self.accesses() if verb == "written" else [] if self.write is None else [self.write]

    def unordered(self, accesses: list[Access], clock: Clock) -> list[Access]:
        """Those that `clock` does not know to be over."""
        return [access for access in accesses if not clock.knows(access.point(self.on_device))]

    def note(self, access: Access) -> None:
        """Remembers what was done to it."""
        if access.verb == "written":
            self.write = access
            self.reads.clear()
        else:
            points = (access.host, access.stream)
            self.reads[tuple(point and point.actor for point in points)] = access
