"""A stand-in for DeepSpeed's stage 2 on one rank, as its source reads: our side of the contract, tried without it.

It proves nothing about DeepSpeed itself; `test_train_ranks.py` runs that where it is installed.
"""

import types

import torch


class Engine:
    """Updates flat copies of the parameters; the optimizer's state is tied to them at the first update alone."""

    def __init__(self, model, optimizer, config):
        self.module, self.optimizer, self.config = model, optimizer, config
        self.groups = [group["params"] for group in optimizer.param_groups]
        self.flats = [torch.cat([p.detach().reshape(-1) for p in group]) for group in self.groups]
        for group, flat in zip(optimizer.param_groups, self.flats, strict=True):
            group["params"] = [flat]
        self.gradients, self.moments = {}, {}
        for parameter in (p for group in self.groups for p in group):
            parameter.engine = self

    def __call__(self, *inputs):
        return self.module(*inputs)

    def backward(self, loss):
        assert not self.gradients, "gradients of the last step were not used up"
        loss.backward()
        for parameter in (p for group in self.groups for p in group):
            self.gradients[id(parameter)], parameter.grad = parameter.grad, None

    def step(self):
        groups = self.optimizer.param_groups
        for place, (members, flat) in enumerate(zip(self.groups, self.flats, strict=True)):
            flat.grad = torch.cat([self.gradients[id(p)].reshape(-1) for p in members])
            self.optimizer.param_groups = [groups[place]]
            self.optimizer.step()
            self.optimizer.param_groups = groups
            # Once, after the first group: what the others do not have by then they never get.
            if not self.moments:
                self.moments = {id(p): {} for group in self.groups for p in group}
                for other, whole in zip(self.groups, self.flats, strict=True):
                    for name, value in self.optimizer.state[whole].items():
                        if value.shape == whole.shape:
                            for p, part in zip(other, value.split([p.numel() for p in other]), strict=True):
                                self.moments[id(p)][name] = part
            with torch.no_grad():
                for p, part in zip(members, flat.split([p.numel() for p in members]), strict=True):
                    p.copy_(part.view_as(p))
        self.gradients = {}


def modules():
    """`deepspeed` and `deepspeed.utils`, by name."""
    utils = types.SimpleNamespace(
        safe_get_full_fp32_param=lambda p: p.detach().clone(),
        safe_get_full_grad=lambda p: p.engine.gradients[id(p)].clone(),
        safe_set_full_grad=lambda p, value: p.engine.gradients[id(p)].copy_(value),
        safe_get_full_optimizer_state=lambda p, name: p.engine.moments[id(p)][name].view_as(p).clone(),
        safe_set_full_optimizer_state=lambda p, value, name: p.engine.moments[id(p)][name].copy_(value.reshape(-1)),
    )

    def initialize(*, model, optimizer, config, dist_init_required):
        return Engine(model, optimizer, config), optimizer, None, None

    deepspeed = types.SimpleNamespace(init_distributed=lambda **options: None, initialize=initialize, utils=utils)
    return {"deepspeed": deepspeed, "deepspeed.utils": utils}
