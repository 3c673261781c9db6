"""Pass calls between a program and its episode, over two event loops."""

import asyncio
import threading
from concurrent.futures import Future

from covey_integrations.gateway.refused import Refused
from covey_integrations.gateway.wire import ChatRequest, RunSampling, Spoken

OVER = "the episode is over"


class Endpoint:
    """One episode's own way in. One call is answered at a time."""

    def __init__(self, key: str, url: str, run: RunSampling) -> None:
        """Must be called while the event loop runs."""
        self.key = key
        self.url = url
        """Value of the program's base_url."""
        self.run = run
        self.reward: float | None = None
        """Reward that the program posted last."""
        self._loop = asyncio.get_running_loop()
        self._calls: asyncio.Queue[ChatRequest] = asyncio.Queue()
        self._lock = threading.Lock()
        self._pending: Future[Spoken] | None = None
        self._is_over = False
        self._takes_rewards = True

    @property
    def reward_url(self) -> str:
        """Return where a program may post {"reward": 0.5}."""
        return self.url.removesuffix("v1") + "reward"

    # ---- the event loop of the server

    async def ask(self, request: ChatRequest) -> Spoken:
        """Wait for the policy's turn. Refused after the episode, or during another call."""
        with self._lock:
            if self._is_over:
                raise Refused(410, OVER, code="episode_over")
            if self._pending is not None:
                raise Refused(409, "another call of this episode is being answered: one at a time", code="busy")
            pending: Future[Spoken] = Future()
            self._pending = pending
        try:
            self._loop.call_soon_threadsafe(self._calls.put_nowait, request)
        except RuntimeError as error:  # the loop is closed
            raise Refused(410, OVER, code="episode_over") from error
        return await asyncio.wrap_future(pending)

    def take_reward(self, reward: float) -> None:
        """Note the program's own reward. The last one counts."""
        with self._lock:
            if not self._takes_rewards:
                raise Refused(410, OVER, code="episode_over")
            self.reward = reward

    # ---- the event loop of the run

    @property
    def waits(self) -> bool:
        return self._pending is not None

    async def next_call(self) -> ChatRequest:
        return await self._calls.get()

    def answer(self, spoken: Spoken) -> None:
        if (pending := self._taken()) is not None:
            pending.set_result(spoken)

    def refuse(self, refused: Refused) -> None:
        """Refuse the call that waits. The program may call again."""
        if (pending := self._taken()) is not None:
            pending.set_exception(refused)

    def end(self, refused: Refused, *, takes_rewards: bool) -> None:
        """Refuse waiting and later calls. A reward may still be taken."""
        with self._lock:
            self._is_over = True
            self._takes_rewards = takes_rewards
        self.refuse(refused)

    def _taken(self) -> "Future[Spoken] | None":
        with self._lock:
            pending, self._pending = self._pending, None
        return pending
