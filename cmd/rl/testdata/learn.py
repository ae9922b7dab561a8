"""One step of REINFORCE in Python's own words, on the episodes that a rank of cmd/rl played.

    python learn.py IN OUT    IN: {observations, actions, env, gamma, lr, model}; OUT: {loss, model}
"""
import sys

import torch
from play import Policy

given = torch.load(sys.argv[1])
policy = Policy(len(given["model"]["affine1.bias"]))
policy.load_state_dict(given["model"])
optimizer = torch.optim.Adam(policy.parameters(), lr=given["lr"])
env = given["env"].tolist()
returns = torch.zeros(len(env), dtype=torch.float64)
for e in set(env):
    steps = [i for i, other in enumerate(env) if other == e]
    g = 0.0
    for i in reversed(steps):
        g = 1.0 + given["gamma"] * g
        returns[i] = g
returns = (returns - returns.mean()) / (returns.std(unbiased=False) + 1e-8)
log_prob = torch.distributions.Categorical(logits=policy(given["observations"])).log_prob(given["actions"])
loss = -(log_prob * returns).sum() / len(set(env))
loss.backward()
optimizer.step()
torch.save({"loss": loss.item(), "model": policy.state_dict()}, sys.argv[2])
