"""Several processes at one command, as torchrun starts them: the first runs it and hands work out, the others wait for it.

The first looks up, prints and writes; what it hands out, all of them do in the same steps, whatever happens in any of them. What
travels lies on the CPU and goes by gloo.
"""

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from headrank.errors import HeadrankError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
PATIENCE = timedelta(days=7)  # the first may be long at what it does alone; who ends closes connections, which the others notice at once
WRONG_USAGE = 2  # exit code
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # LOCAL_RANK too: some clusters set the others for every program

Described = list[tuple[str, tuple[int, ...], Any]]
"""Name, shape and dtype of tensors that are to come."""


class Stopped(BaseException):
    """This process was told to end, as torchrun does when another one is lost."""


class Ended(Exception):  # noqa: N818 (no error)
    """The work that was handed out has ended early, for a reason that the first process knows."""


class Team:
    """The processes at work; this one is alone. Nothing travels, and every step is what it is without others."""

    rank, world = 0, 1

    def share(self, n: int) -> range:
        """Which of n things are this process's: a run of them, so that the first has some if any has."""
        first, stop = (-(-n * rank // self.world) for rank in (self.rank, self.rank + 1))
        return range(first, stop)

    def handing_out(self, task: object) -> Any:
        """Context in which the others do a task too."""
        return nullcontext()

    def together(self, make: Callable[[], T]) -> T:
        """Calls make(), as all processes do in this step. Where it raises in one of them, none goes on."""
        return make()

    def check(self) -> None:
        """To be called now and then within make(): ends it where another process has failed."""

    def collect(self, facts: Any, tensors: Mapping[str, "Tensor"]) -> Iterator[tuple[int, Any, Iterator[tuple[str, "Tensor"]]]]:
        """Gives what this process has to the first one, which gets rank, facts and tensors of each other one. All processes must iterate."""
        yield from ()


class Company(Team):
    """The processes of torchrun; they find each other when the first has something to say."""

    def __init__(self, rank: int, world: int, local_rank: int) -> None:
        self.rank, self.world, self.local_rank = rank, world, local_rank
        self._store: Any = None
        self._step = 0
        self._is_between = True  # whether all processes are known to be between two tasks

    @contextmanager
    def handing_out(self, task: object) -> Iterator[None]:
        self._tell(task)
        self._is_between = False
        self.together(lambda: None)  # the others say whether they can begin
        yield
        self._is_between = True

    def next_task(self) -> Any:
        """Waits for what the first process hands out. None at the end."""
        return self._tell(None)

    def together(self, make: Callable[[], T]) -> T:
        """As for one that is alone, and the error of the first process that failed is raised in the first of all; Ended in the others."""
        fault = None
        try:
            made = make()
        except Exception as error:
            fault = error
            self._store.set(self._stop_key, "")
        texts: list[str | None] = [None] * self.world
        with self._noticing_loss():
            import torch.distributed as dist

            dist.all_gather_object(texts, None if fault is None or isinstance(fault, Ended) else self._told(fault))
        self._step += 1
        if not any(texts):
            return made
        self._is_between = True
        if self.rank:
            raise Ended
        if fault is not None and not isinstance(fault, Ended):
            raise fault
        raise HeadrankError(next(text for text in texts if text is not None))

    def check(self) -> None:
        with self._noticing_loss():
            if self._store.check([self._stop_key]):
                raise Ended

    def collect(self, facts: Any, tensors: Mapping[str, "Tensor"]) -> Iterator[tuple[int, Any, Iterator[tuple[str, "Tensor"]]]]:
        import torch.distributed as dist

        described: Described = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
        every: list[Any] | None = None if self.rank else [None] * self.world
        with self._noticing_loss():
            dist.gather_object((facts, described) if self.rank else None, every)
            if self.rank:
                for tensor in tensors.values():
                    dist.send(tensor.cpu().contiguous(), 0)
        for rank, (its, coming) in enumerate((every or [])[1:], 1):
            yield rank, its, self._received(rank, coming)

    def dismiss(self) -> None:
        """Tells the others that the command is over; not where they are in the midst of something, which ends when this process does."""
        if self._is_between:
            with suppress(HeadrankError):  # of one that is lost nothing was needed any more
                self._tell(None)

    def leave(self) -> None:
        """Closes the connections. An interpreter that ends with open ones may be aborted."""
        if self._store is not None:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()
            self._store = None

    @property
    def _stop_key(self) -> str:
        return f"headrank/stop/{self._step}"

    def _tell(self, task: object) -> Any:
        """The first process's task, in all of them."""
        self._connect()
        import torch.distributed as dist

        told = [task]
        with self._noticing_loss():
            dist.broadcast_object_list(told, 0)
        return told[0]

    def _connect(self) -> None:
        if self._store is not None:
            return
        import torch
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        if torch.cuda.is_available():
            torch.cuda.set_device(self.local_rank % torch.cuda.device_count())
        with self._noticing_loss(), _stdout_aside():  # some versions of gloo say there whom they reached
            self._store = next(rendezvous("env://", timeout=PATIENCE))[0]
            dist.init_process_group("gloo", store=self._store, rank=self.rank, world_size=self.world, timeout=PATIENCE)
        if not self.rank:  # the others have nothing to clear up; and while it waits for them to connect, python would not come to handle a signal
            signal.signal(signal.SIGTERM, _stop)

    def _received(self, rank: int, coming: Described) -> Iterator[tuple[str, "Tensor"]]:
        """One tensor after the other, so that one alone takes memory here."""
        import torch
        import torch.distributed as dist

        for name, shape, dtype in coming:
            tensor = torch.empty(shape, dtype=dtype)
            with self._noticing_loss():
                dist.recv(tensor, rank)
            yield name, tensor

    def _told(self, error: Exception) -> str:
        """The text of an error for the first process. A fault of headrank leaves its traceback here."""
        if not isinstance(error, HeadrankError) and self.rank:
            traceback.print_exception(error, file=sys.__stderr__)
        text = str(error) if isinstance(error, HeadrankError) else f"{type(error).__name__}: {error}"
        return f"{text}\n(process {self.rank} of {self.world}, on {socket.gethostname()})"

    @contextmanager
    def _noticing_loss(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:  # of the connection: gloo and the store raise it, and kinds of it
            self._is_between = False
            raise HeadrankError(f"another of the {self.world} processes was lost; start again") from None


ALONE = Team()
_team: ContextVar[Team] = ContextVar("team", default=ALONE)


def team() -> Team:
    """The processes that share this command's measurements."""
    return _team.get()


def started() -> Company | None:
    """This process's place among those that torchrun started; None where it is alone."""
    given = [os.environ.get(name, "") for name in VARIABLES]
    if not all(given) or not all(number.isdecimal() for number in given[:3]) or int(given[1]) < 2:
        return None
    return Company(*map(int, given[:3]))


@contextmanager
def company(work: Callable[[Any, Team], None]) -> Iterator[None]:
    """Context of a command: the first process runs it, and the others, who never enter, do what it hands out until it is over.

    work(task, team): what they do with a task. Without torchrun nothing happens. Raises SystemExit in the others, and Stopped where
    torchrun ends the command.
    """
    this = started()
    if this is None:
        yield
        return
    if this.rank:
        raise SystemExit(_serve(this, work))
    token = _team.set(this)
    try:
        yield
    except Exception:
        this.dismiss()
        raise
    else:
        this.dismiss()
    finally:
        _team.reset(token)
        this.leave()


def _serve(this: Company, work: Callable[[Any, Team], None]) -> int:
    """Returns the exit code: the command's own is that of the first process."""
    try:
        while (task := this.next_task()) is not None:
            try:
                work(task, this)
            except Ended:
                continue
        return 0
    except HeadrankError:  # the first process is gone
        return 1
    finally:
        this.leave()


@contextmanager
def only_the_first_speaks() -> Iterator[None]:
    """Context of a whole program, in which other processes than the first print nothing but how they crashed.

    Wrong usage is no failure of theirs: torchrun would end the first, for one that failed before it, while it says what is wrong.
    """
    this = started()
    if this is None or not this.rank:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            yield
        except SystemExit as end:
            if end.code == WRONG_USAGE:
                raise SystemExit(0) from None
            raise


def _stop(number: int, frame: Any) -> None:
    raise Stopped


@contextmanager
def _stdout_aside() -> Iterator[None]:
    """What libraries print goes to stderr: stdout is for results."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
