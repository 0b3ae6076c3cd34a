r"""Games and tasks of GEM (github.com/axon-rl/gem) by their name, for rollout.max_turns > 1.

Needs the package gem-llm and what the game needs. It pins old versions of its own needs, so install
it without them: pip install --no-deps gem-llm; pip install 'reasoning-gym>=0.1.25'. Then
python -c 'import gem; gem.print_envs()' lists the names.

Row: {"messages": [...], "game": "game:GuessTheNumber-v0-easy", "seed": 3}. What the game says at
its start is added to the last message of the prompt. Each turn of the model is an action, and the
reward of each action is that of the game.

GEM seeds the random numbers of the whole process, so run it with rollout.env_isolation=process:
then the trainer's are not changed. The seed gives each trajectory of a group the same start. One
step on a CPU, with a small model in the folder MODEL:

    python -m rl2.trainer.ppo rollout.env_path=gem_games data.path=examples/rows/gem_games.jsonl \
        actor.model_name=MODEL trainer.max_steps=1 data.prompts_per_rollout=3 \
        data.responses_per_prompt=2 rollout.train_sampling_params.max_new_tokens=16 \
        rollout.max_turns=5 rollout.env_isolation=process
"""


class make_env:
    """A game of GEM."""

    def reset(self, game, seed):
        import gem

        self.game = gem.make(game)
        observation, info = self.game.reset(seed=seed)
        return f"\n{observation}{info.get('suffix', '')}"

    def step(self, action):
        observation, reward, terminated, truncated, info = self.game.step(action)
        content = f"{observation}\n{info.get('suffix', '')}".strip()
        return content, reward, terminated, truncated, info

    def close(self):
        close = getattr(getattr(self, "game", None), "close", None)
        if close is not None:
            close()
