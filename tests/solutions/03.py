answer_1 = 0.5 * torch.log(torch.tensor(1 + (1 + 9 * 0.5) / 0.25))
answer_2 = lambda L: torch.log(torch.tensor(L + 1.0))
answer_3 = 7
answer_4 = 0.8457
answer_5 = "b"
answer_6 = lambda left, x, zone, total: torch.where(((x >= zone[0]) & (x <= zone[1])).all(-1), total, left)
