"""What the tests of lab 03 share: seeded generators, simulated runs, beliefs about them, and walks of a constraint."""

import torch

from labkit.design.belief import ParticleBelief


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def runs(model, rollouts, steps, seed=0):
    """θ_0 (R, p), random designs (R, T, d) and their outcomes (R, T)."""
    draw = seeded(seed)
    theta, designs = model.sample_prior((rollouts,), draw), model.sample_designs((rollouts, steps), draw)
    return theta, designs, model.simulate(theta[:, None], designs, generator=draw)


def learnt(model, designs, outcomes, num_particles=1000, seed=1, **options):
    belief = ParticleBelief.prior(model, len(designs), num_particles, seeded(seed), **options)
    for t in range(designs.shape[1]):
        belief = belief.update(designs[:, t], outcomes[:, t])
    return belief


def walk(constraint, x0, us):
    """Decode move after move: path (batch, T, d) and the states before each design, and the last."""
    states, path = [constraint.init(x0, len(us))], []
    for u in us:
        path.append(constraint.decode(states[-1], u))
        states.append(constraint.step(states[-1], path[-1]))
    return torch.stack(path, -2), states
