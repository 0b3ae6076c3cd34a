"""A small server of OpenEnv, whose task is to write a word backwards.

python examples/rows/backwards_server.py [PORT]
"""

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

WORDS = ("stone", "river", "cloud", "maple", "candle")


class Turn(Action):
    message: str


class Answer(Observation):
    text: str


class Backwards(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
        self.word = random.Random(seed).choice(WORDS)
        self.turns = 0
        return Answer(text=f"Write this word backwards: {self.word}")

    def step(self, action, timeout_s=None, **options):
        self.turns += 1
        is_right = action.message.strip() == self.word[::-1]
        text = "Right." if is_right else "No. Try again."
        return Answer(text=text, reward=float(is_right), done=is_right)

    @property
    def state(self):
        return State(step_count=self.turns)


if __name__ == "__main__":
    app = create_app(Backwards, Turn, Answer, max_concurrent_envs=64)
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
