"""What learning from answers would take: prompts are known to the token, of answers how many and how long at most."""

from __future__ import annotations

from dataclasses import dataclass, replace

from twinkle.core.job import JobFailed
from twinkle.jobs.context import JobContext
from twinkle.jobs.data import DataUse
from twinkle.jobs.estimate import AdapterShape, Tokens, Work
from twinkle.jobs.reinforcement.course import PolicyCourse
from twinkle.jobs.training.course import decide, split_rows
from twinkle.jobs.training.data import TrainingData, open_data
from twinkle.jobs.training.reckoning import around, num_kept, tokens_of, tokens_of_steps
from twinkle.wire.bodies.jobs_rl import DistillSpec, RolloutSpec


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Who is asked what it thinks of the answers, token by token, and of which of them.

    Args:
        base_model: A reference, or a teacher.
        of_evaluations: Whether the answers of evaluations are shown to it too.
    """

    base_model: str
    of_evaluations: bool


async def work_of_policy(
    spec: RolloutSpec,
    course: PolicyCourse,
    data: TrainingData,
    *,
    base_model: str,
    adapter: AdapterShape,
    eval_answers: int,
    questions: Questions | None,
) -> Work:
    """All that learning from answers will have meshes do."""
    steps = range(1, course.num_steps + 1)
    prompts = await tokens_of_steps(course, data, course.num_steps)
    num_looks = sum(course.evaluates_after(step) for step in range(course.num_steps + 1))
    looked_at = num_looks * await tokens_of(data, range(course.num_rows, course.num_rows + course.num_eval_rows))
    num_answers = course.group_size * sum(len(course.rows_of(step)) for step in steps)
    num_looked_at = num_looks * course.num_eval_rows * eval_answers

    def counts(length: int) -> Tokens:
        trained = prompts * course.group_size + num_answers * length
        drawn = (num_answers + num_looked_at) * length
        return Tokens(trained=trained, prefilled=prompts + looked_at, drawn=drawn)

    def asked(length: int) -> Tokens:
        """Each answer with its prompt is a prompt, behind which one token is drawn."""
        if questions is None:
            return Tokens()
        told = prompts * course.group_size + num_answers * length
        also = looked_at * eval_answers + num_looked_at * length if questions.of_evaluations else 0
        num = num_answers + (num_looked_at if questions.of_evaluations else 0)
        return Tokens(prefilled=told + also, drawn=num)

    is_own = questions is not None and questions.base_model == base_model
    most, least = counts(spec.max_tokens), counts(1)
    if is_own:
        most, least = most + asked(spec.max_tokens), least + asked(1)
    stays = num_kept(spec, course, course.num_steps)
    budget = spec.max_train_tokens
    if budget is not None and most.trained > budget:
        # It ends behind the step at which the budget is used up.
        longest = course.batch_size * course.group_size * (data.longest_row + spec.max_tokens)
        most = replace(most, trained=min(most.trained, budget + longest))
        least = replace(least, trained=min(least.trained, most.trained))
    elsewhere = () if questions is None or is_own else (_work(questions.base_model, asked(spec.max_tokens), asked(1)),)
    return replace(
        _work(base_model, most, least),
        num_steps=course.num_steps,
        adapter=adapter,
        num_kept_with_optimizer=stays,
        num_kept=stays,
        around=around(spec, course, course.num_steps, also_opened=course.num_steps + num_looks),
        elsewhere=elsewhere,
        details={
            "rows": course.num_rows,
            "eval_rows": course.num_eval_rows,
            "epochs": round(course.num_epochs, 3),
            "batch_size": course.batch_size,
            "answers": num_answers,
            "eval_answers": num_looked_at,
            "stopped_by": "budget" if budget is not None and least.trained >= budget else None,
        },
    )


async def work_of_teaching(
    context: JobContext[DistillSpec], prompts: TrainingData, *, base_model: str, teacher: str, adapter: AdapterShape
) -> Work:
    """A teacher answers all prompts, then the student is trained on that; as if none of the answers were cut."""
    spec = context.spec
    seed = context.job.seed if spec.seed is None else spec.seed
    num_prompts, told = len(prompts.train_numbers), prompts.train.num_tokens
    num_rows, held_out, num_eval_tokens = num_prompts * spec.group_size, 0, 0
    longest = prompts.longest_row + spec.max_tokens
    if spec.eval_data is not None:
        own = {"data": spec.eval_data, "split": spec.eval_split, "eval_data": None, "eval_fraction": 0.0}
        eval_data = await open_data(
            context.for_spec(spec.model_copy(update=own)), base_model, seed=seed, use=DataUse.SUPERVISED
        )
        held_out, num_eval_tokens = len(eval_data.train_numbers), eval_data.train.num_tokens
        longest = max(longest, eval_data.longest_row)
    elif spec.eval_fraction:
        if num_rows < 2:
            raise JobFailed("invalid_data", "one row cannot be split; leave eval_fraction out", field="eval_fraction")
        trained, kept = split_rows(seed, num_rows, spec.eval_fraction)
        num_rows, held_out = len(trained), len(kept)
    course = decide(
        spec,
        seed=seed,
        num_rows=num_rows,
        num_eval_rows=held_out,
        longest_row=longest,
        whole_batches=False,
        with_reference=False,
    )
    num_seen = sum(len(course.rows_of(step)) for step in range(1, course.num_steps + 1))
    num_looks = sum(course.evaluates_after(step) for step in range(course.num_steps + 1))

    def counts(length: int) -> Tokens:
        """Which prompts are in which step follows from the answers: each counts as much as they do on average."""
        looked_at = num_eval_tokens if spec.eval_data is not None else held_out * (told / num_prompts + length)
        return Tokens(trained=round(num_seen * (told / num_prompts + length)), forwarded=round(num_looks * looked_at))

    most, least = counts(spec.max_tokens), counts(1)
    budget = spec.max_train_tokens
    if budget is not None:
        most, least = [replace(one, trained=min(one.trained, budget)) for one in (most, least)]
    num_answers = num_prompts * spec.group_size
    taught = _work(
        teacher,
        Tokens(prefilled=told, drawn=num_answers * spec.max_tokens),
        Tokens(prefilled=told, drawn=num_answers),
    )
    stays = num_kept(spec, course, course.num_steps)
    return replace(
        _work(base_model, most, least),
        num_steps=course.num_steps,
        adapter=adapter,
        num_kept_with_optimizer=stays,
        num_kept=stays,
        around=around(spec, course, course.num_steps, also_opened=0),
        elsewhere=(taught,),
        details={
            "rows": num_rows,
            "eval_rows": held_out,
            "epochs": round(course.num_epochs, 3),
            "batch_size": course.batch_size,
            "answers": num_answers,
            "stopped_by": "budget" if budget is not None and least.trained >= budget else None,
        },
    )


def _work(base_model: str, most: Tokens, least: Tokens) -> Work:
    return Work(
        base_model=base_model,
        num_trained=most.trained,
        num_forwarded=most.forwarded,
        num_prefilled=most.prefilled,
        num_drawn=most.drawn,
        least=least,
    )
