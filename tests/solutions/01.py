answer_1 = 0.0713
answer_2 = 0.0713**0.5
answer_3 = "60"
answer_4 = (protocol.loc["0", "perplexity_dense"] * protocol.loc["0", "perplexity_teal"]) ** 0.5
answer_5 = "objective"
answer_6 = lambda parts: parts.sum(0)
answer_7 = "no"
answer_8 = 2.24
