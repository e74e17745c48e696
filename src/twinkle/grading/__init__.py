"""What an answer is worth, by graders that are data: pure, and the same in a request and in a job.

similarity  how alike two texts are
grade       a grader applied to one answer; models and rewards are asked through protocols
rewards     the library's rewards and searches for patterns, in processes that are ended when an answer takes too long
"""
