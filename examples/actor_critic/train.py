"""Train an actor and its critic by reinforcement learning: two passes and two optimizers in each step.

    elastic-launch --standalone --nproc 2 examples/actor_critic/train.py --checkpoint runs/actor-critic

A cart on a line is pushed to the left or right in each tick, and is to come to rest in the middle. A step's
micro-batches are starts of episodes. The first pass teaches the critic what an episode is worth, and the second one
lets the actor prefer what was better than the critic expected. Each pass plays its own episodes: a pass computes itself
what it needs, since another process may take part in it. The weights are bitwise identical at any number of workers and
after any fault.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn

import elastic_launch as el

TICKS = 24
DISCOUNT = 0.9


def starts(step: int, micro: el.MicroBatch) -> Tensor:
    """Return a position and a velocity for each episode."""
    return 2 * torch.rand(len(micro), 2) - 1


def play(actor: nn.Module, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Play one episode from each state; return the states, the actions, and what each was worth."""
    seen, actions, rewards = [], [], []
    with torch.no_grad():
        for _ in range(TICKS):
            action = torch.distributions.Categorical(logits=actor(states)).sample()
            seen.append(states)
            actions.append(action)
            velocity = 0.95 * states[:, 1] + 0.2 * (2 * action - 1)
            states = torch.stack([states[:, 0] + 0.2 * velocity, velocity], dim=1)
            rewards.append(-(states[:, 0] ** 2) - 0.1 * velocity**2)
        worth, value = [], torch.zeros(len(states))
        for reward in reversed(rewards):
            value = reward + DISCOUNT * value
            worth.insert(0, value)
    return torch.cat(seen), torch.cat(actions), torch.cat(worth)


def network(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, outputs))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--checkpoint", help="directory or URL to save to and to resume from")
    parser.add_argument("--result", type=Path, help="file to which rank 0 writes the result as JSON")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    with el.session() as run:
        torch.manual_seed(0)
        models = {"actor": network(2), "critic": network(1)}
        actor, critic = models.values()
        optimizers = {name: torch.optim.Adam(model.parameters(), lr=1e-2) for name, model in models.items()}
        loader = el.FunctionLoader(starts, el.GlobalBatch(32, micro=8), seed=0)
        checkpoint = el.Checkpoint(args.checkpoint, every="30s") if args.checkpoint else None
        worth = norm = math.nan
        steps = run.steps(
            loader,
            models,
            optimizers,
            checkpoint=checkpoint,
            until=f"{args.steps}ba",
            exact=True,
            metrics=["worth"],
        )
        for step in steps:
            for begun in step:
                states, _, returns = play(actor, begun)
                loss = nn.functional.mse_loss(critic(states).squeeze(1), returns)
                step.backward(loss, metrics={"worth": returns.mean()})
            step.update(optimizer="critic")
            worth = step.metrics["worth"]

            for begun in step:
                states, actions, returns = play(actor, begun)
                chosen = torch.distributions.Categorical(logits=actor(states))
                better = returns - critic(states).squeeze(1).detach()
                loss = -(chosen.log_prob(actions) * better).mean() - 0.01 * chosen.entropy().mean()
                step.backward(loss, metrics={"worth": returns.mean()})
            norm = step.grad_norm("actor")
            step.update(optimizer="actor", clip_norm=0.5)

            if run.rank == 0 and step.number % 25 == 0:
                print(f"step {step.number} worth {worth:.4f} gradient {norm:.4f}", flush=True)
        if run.rank == 0:
            result = {"steps": args.steps, "worth": worth}
            result |= {f"{name}_sha256": el.weights_sha256(model) for name, model in models.items()}
            result |= {"worlds": run.worlds, "restarts": run.restarts, "resumed_step": run.resumed_step}
            print(json.dumps(result), flush=True)
            if args.result:
                args.result.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
