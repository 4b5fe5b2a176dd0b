"""A parameter that an optimizer changes between the forward and the backward pass."""

import warnings

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks

import gpulab as gl


def actor_and_critic(optimizer):
    """Step the critic before the actor's loss, which was computed with it, is differentiated."""
    torch.manual_seed(0)
    actor, critic = nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    critic_steps = optimizer(critic.parameters())
    actions = actor(torch.rand(6, 4))
    value = critic(actions.detach()).square().mean()
    actor_loss = -critic(actions).mean()
    value.backward()
    critic_steps.step()
    critic_steps.zero_grad()
    actor_loss.backward()


class WritesThroughData(torch.optim.Optimizer):
    """An optimizer as written before `torch.no_grad`: autograd does not see its step."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(parameter.grad, alpha=-0.1)


OPTIMIZERS = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.1, foreach=True),
    "WritesThroughData": WritesThroughData,
}


def findings(program):
    with warnings.catch_warnings(action="ignore"), gl.guard(on="warn") as report:
        program()
    return report.findings


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_guard_names_the_optimizer_step_that_changed_a_parameter(name):
    found = findings(lambda: actor_and_critic(OPTIMIZERS[name]))
    assert {finding.cause for finding in found} == {"step"}
    assert {finding.lines["changed by"].text for finding in found} == {"critic_steps.step()"}
    explanation = (
        f"it is a parameter, which the step of the optimizer {name} changed after the forward pass"
    )
    assert {finding.explanation.partition(";")[0] for finding in found} == {explanation}
    assert all(
        "changed by actor_and_critic" in str(f) and f.remedy.startswith("step after backward")
        for f in found
    )


def test_guard_blames_no_optimizer_step_made_before_the_forward_pass():
    net, x = nn.Linear(3, 2), torch.rand(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def program():
        net(x).sum().backward()
        optimizer.step()
        y = net(x * net.weight[0])
        x.add_(1)
        y.sum().backward()

    (finding,) = findings(program)
    assert (finding.cause, finding.function) == ("inplace", "mul")


def test_guard_calls_a_parameter_changed_by_hand_a_parameter():
    net, x = nn.Linear(3, 2), torch.rand(4, 3, requires_grad=True)

    def program():
        y = net(x)
        with torch.no_grad():
            net.weight.clamp_(-0.01, 0.01)
        y.sum().backward()

    (finding,) = findings(program)
    assert (finding.cause, list(finding.lines)) == ("step", ["saved by"])
    assert "it is a parameter that was changed in place" in finding.explanation


def test_guard_leaves_no_hook_with_optimizers():
    before = dict(hooks)
    guard = gl.guard()
    with guard, guard:
        assert len(hooks) == len(before) + 1
    assert dict(hooks) == before
