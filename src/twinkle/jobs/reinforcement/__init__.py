"""Learning from rewards and from teachers: answers are sampled, judged, and trained on, step by step.

advantages  how much better than the rest of its group each answer is
rollouts    answers as they were sampled, and the datums that are made of them
judging     what answers are worth: graders, models that judge, and what failed
"""
