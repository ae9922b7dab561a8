"""Writes goldens.json: episodes of Gymnasium's own CartPole-v1, state by state, to hold the Go one against.

    pip install gymnasium==1.4.0 && python gen_goldens.py > goldens.json
"""
import json
import random

import gymnasium


def balance(state):  # keeps the pole up for ever
    x, v, a, w = state
    return int(a + 0.5 * w + 0.02 * x + 0.1 * v > 0)


def drive_right(state):  # upright, off the track's right end
    x, v, a, w = state
    return int(a + 0.5 * w > 0.18 * max(0.0, 1.2 - v))


policies = {
    "always left": lambda state, draw: 0,
    "always right": lambda state, draw: 1,
    "random": lambda state, draw: draw.randrange(2),
    "balance": lambda state, draw: balance(state),
    "drive right": lambda state, draw: drive_right(state),
    "drive left": lambda state, draw: 1 - drive_right([-s for s in state]),
}
episodes = []
for seed, (name, policy) in enumerate(policies.items()):
    draw = random.Random(seed)
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=seed)
    states, actions = [env.unwrapped.state.tolist()], []
    total, terminated, truncated = 0.0, False, False
    while not terminated and not truncated:
        action = policy(states[-1], draw)
        _, reward, terminated, truncated, _ = env.step(action)
        actions.append(action)
        states.append(env.unwrapped.state.tolist())
        total += reward
    episodes.append(
        dict(policy=name, states=states, actions=actions, total=total, terminated=terminated, truncated=truncated)
    )
json_text = ",\n".join(json.dumps(e) for e in episodes)
print("[" + json_text + "]")
