"""Learning from rewards and from teachers: answers are sampled, judged, and trained on, step by step.

course      which prompts are answered when, and under which numbers
sampling    answers drawn through the service, and what a reference thinks of them
judging     what answers are worth: graders, models that judge, and what failed
advantages  how much better than the rest of its group each answer is
rating      what is to be learnt from a step's answers
rollouts    the datums that are made of them
steps       a step, submitted and taken in
teaching    distillation off policy: answers of a teacher, then a supervised training
asking      models asked as the OpenAI-compatible routes are
plan        the plans of kinds ``grpo`` and ``distill``
"""
