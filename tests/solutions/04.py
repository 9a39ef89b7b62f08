answer_1 = lambda c, wins: np.where(wins, values * np.where(wins, 1, np.minimum(c / values, 1)).min(-1, keepdims=True), 0)
answer_2 = ((0.01, 1), (0, 0.5), 0.5)
answer_3 = (0.1**0.5, 1 / (2 * 0.1**0.5) - 1)
answer_4 = 11
answer_5 = 14.75
