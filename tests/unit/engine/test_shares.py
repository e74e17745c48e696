"""Which rank computes what: a function of the job alone, and a fair one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from twinkle.core.errors import InvalidInput, OutOfMemory, UserError
from twinkle.model.fused.job_run import FailureReport, shares_of
from twinkle.model.fused.training import Datum

lengths = st.lists(st.integers(1, 500), min_size=1, max_size=40)


def data_of(sizes, first_token=0):
    return [Datum(tokens=np.arange(first_token, first_token + size), inputs={}) for size in sizes]


@given(sizes=lengths, num_ranks=st.integers(1, 9))
def test_every_datum_is_one_ranks(sizes, num_ranks):
    shares = shares_of(data_of(sizes), num_ranks)

    assert len(shares) == num_ranks
    assert sorted(index for share in shares for index in share) == list(range(len(sizes)))


@given(sizes=lengths, num_ranks=st.integers(1, 9))
def test_no_rank_has_more_than_its_part_and_one_datum(sizes, num_ranks):
    for share in shares_of(data_of(sizes), num_ranks):
        assert sum(sizes[index] for index in share) <= sum(sizes) / num_ranks + max(sizes)


def test_small_jobs_are_not_all_the_same_ranks():
    owners = {tuple(map(len, shares_of(data_of([8], first_token), 4))) for first_token in range(40)}

    assert len(owners) == 4


def test_an_error_keeps_its_kind_and_its_words_on_the_way_to_another_rank():
    for error, kind in ((InvalidInput("data", "is bad"), UserError), (OutOfMemory("no room"), OutOfMemory)):
        arrived = FailureReport.of(error).to_error()
        assert isinstance(arrived, kind)
        assert str(arrived) == str(error)
    assert str(FailureReport.of(KeyError("x")).to_error()) == "KeyError: 'x'"
