answer_1 = ((1 - 0.25) * 100 / 0.25) ** 0.5
answer_2 = round(((2.3263 + 1.2816 * (0.35 * 0.65 / 0.1875) ** 0.5) * 0.1875**0.5 / 0.1) ** 2)
answer_3 = 8 * 0.75**4
answer_4 = np.tile(text, (3, 1))
answer_5 = "b"
answer_6 = lambda bits: np.pad(bits, (0, 100 - len(bits)))
