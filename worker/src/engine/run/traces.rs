//! The span of an execution as a span of OpenTelemetry: its parent, attributes and status, by the semantic conventions for messaging.
//!
//! The `tracing-opentelemetry` layer of the application exports it. Without that layer, these functions have no effect.

use opentelemetry::trace::{Status, TraceContextExt as _};
use recruiter_common::{job::Job, traces::remote};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use crate::{context::Context, engine::record::verdict::Verdict};

/// Makes the span a child of the span in which the job was enqueued. Without one, it is the root of a new trace.
pub(super) fn begin(span: &Span, job: &Job) {
    let parent = job.settings.traceparent.as_deref().and_then(remote).unwrap_or_default();
    // Fails without the layer, or if a filter has disabled the span: then it is not exported.
    if span.set_parent(parent).is_err() {
        return;
    }
    span.record("otel.kind", "consumer");
    span.set_attribute("messaging.system", "recruiter");
    span.set_attribute("messaging.operation.name", "process");
    span.set_attribute("messaging.operation.type", "process");
    span.set_attribute("messaging.destination.name", job.settings.group().to_owned());
    span.set_attribute("messaging.message.id", job.id.to_string());
    span.context().span().update_name(format!("process {}", job.settings.group()));
}

/// Gives the span the status of a failed job. A job that was snoozed, interrupted, released or cancelled has not failed.
pub(super) fn end(span: Span, context: &Context, verdict: &Verdict) {
    if let Some((Some(failure), _)) = verdict.for_hooks() {
        span.set_attribute("error.type", failure.class.clone());
        span.set_status(Status::error(context.may_log(&failure.message).to_owned()));
    }
}
