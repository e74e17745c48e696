"""The Celery application. It moves nudges, runs work and shows it; it is never the record."""

from __future__ import annotations

from celery import Celery

from twinkle.core.settings import Settings

HOUSEKEEPING_QUEUE = "housekeeping"


def mesh_queue(mesh: str) -> str:
    """The queue that one mesh's worker consumes, and nobody else."""
    return f"mesh.{mesh}"


def make_app(settings: Settings) -> Celery:
    """An application on the settings' broker. It keeps no results: the journal does."""
    app = Celery("twinkle", broker=settings.redis_url.get_secret_value(), set_as_current=False)
    app.conf.update(
        accept_content=["json"],
        task_serializer="json",
        task_ignore_result=True,
        task_acks_late=False,
        task_create_missing_queues=True,
        task_send_sent_event=False,
        worker_prefetch_multiplier=1,
        worker_send_task_events=True,
        worker_hijack_root_logger=False,
        worker_pool_start_method="spawn",
        worker_cancel_long_running_tasks_on_connection_loss=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={"socket_timeout": 30, "health_check_interval": 10},
    )
    return app
