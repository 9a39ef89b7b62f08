answer_1 = 400
answer_2 = "same"
