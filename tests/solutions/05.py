answer_1 = 300
answer_2 = 0.5 * torch.log1p(torch.tensor(0.25 * 2.35**2 * 0.25 / (0.25 * (0.81 * 0.1 + 0.09) + 0.25)))
answer_3 = lambda whole, first, second: 2 * whole - (first + second) / 2
answer_4 = ((0.95, 0.95), 2000)
answer_5 = 0.5 * sum(torch.log1p(f(0.03 * torch.arange(50)).square().sum() * 0.1 / 0.2 / 12) for f in (torch.cos, torch.sin))
