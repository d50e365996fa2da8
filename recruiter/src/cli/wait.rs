//! `recruiter jobs wait` and `recruiter enqueue --wait`: waits for the end of a job and writes its result.

use std::{
    io::Write,
    time::{Duration, Instant as Monotonic},
};

use anyhow::anyhow;
use bson::{Bson, Document, RawDocumentBuf, doc};
use recruiter_common::{
    exit::Exit,
    ids::JobId,
    job::{FinishReason, Stage},
    store::{Store, StoredJob, lossy},
    wait::WaitError,
};

use super::{
    output::{Format, printable},
    redaction::Reveal,
    view::document_line,
};

/// Waits until a job has ended, and writes its result. The error has [`Exit::JobFailed`] if the job did not succeed, and [`Exit::TimedOut`]
/// if it has not ended in time.
pub(super) async fn until_ended(
    store: &Store,
    id: JobId,
    timeout: Option<Duration>,
    is_deleted_after_success: bool,
    (format, reveal): (Format, Reveal),
    out: &mut impl Write,
) -> anyhow::Result<()> {
    match last_of_chain(store, id, timeout.unwrap_or(Duration::MAX)).await {
        Ok((id, stored)) => write_end(id, reveal.of(store).await?.job(stored.document), format, out),
        Err(gone @ (WaitError::NotKept { .. } | WaitError::Unknown { .. })) => {
            if !is_deleted_after_success && matches!(gone, WaitError::Unknown { .. }) {
                return Err(gone.into());
            }
            if format.json {
                write_json(out, id, FinishReason::DONE.as_str(), doc! { "result": Bson::Null, "kept": false })?;
            } else {
                writeln!(std::io::stderr(), "{id} succeeded; nothing of it is kept")?;
            }
            Ok(())
        }
        Err(late @ WaitError::TimedOut { .. }) => Err(anyhow!(late).context(Exit::TimedOut)),
        Err(other) => Err(other.into()),
    }
}

/// Waits for a job, or for the job that it has become, and so on. A job that became several jobs has ended.
async fn last_of_chain(store: &Store, mut id: JobId, timeout: Duration) -> Result<(JobId, StoredJob), WaitError> {
    let begun = Monotonic::now();
    loop {
        let stored = store.wait_for_end(id, timeout.saturating_sub(begun.elapsed())).await?;
        let next = stored.document.get_array("continued_as").ok().map(|jobs| jobs.into_iter().flatten().collect::<Vec<_>>());
        match next.as_deref() {
            Some([next]) if next.as_object_id().is_some() => id = next.as_object_id().map_or(id, JobId::from),
            Some(_) | None => return Ok((id, stored)),
        }
    }
}

fn write_end(id: JobId, stored: RawDocumentBuf, format: Format, out: &mut impl Write) -> anyhow::Result<()> {
    let document = lossy(&stored);
    let why = document.get_str("why").unwrap_or_default();
    let is_done = why == FinishReason::DONE.as_str();
    let result = document.get("result").cloned().unwrap_or(Bson::Null);
    let failure = if is_done { None } else { failure_in(&document) };
    if format.json {
        let what = failure.as_ref().map_or_else(|| doc! { "result": result }, |failure| doc! { "failure": failure.clone() });
        write_json(out, id, why, what)?;
    } else if is_done && result != Bson::Null {
        writeln!(out, "{}", result.into_relaxed_extjson())?;
    }
    out.flush()?;
    if is_done {
        return Ok(());
    }
    let text = |field: &str| failure.as_ref().and_then(|failure| failure.get_str(field).ok()).unwrap_or_default().to_owned();
    let (class, message) = (text("class"), text("message"));
    let said = if class.is_empty() { String::new() } else { format!(": {}: {}", printable(&class, 80), printable(&message, 400)) };
    Err(anyhow!("job {id} ended as `{}`{said}", printable(why, 80)).context(Exit::JobFailed))
}

/// Writes how a job has ended, for programs, with its result or failure.
fn write_json(out: &mut impl Write, id: JobId, why: &str, what: Document) -> std::io::Result<()> {
    let mut end = doc! { "id": id.to_string(), "state": Stage::of_end(&FinishReason::custom(why)).word(), "why": why };
    end.extend(what);
    document_line(out, end)
}

/// The failure of the last execution: its class, message and trace.
fn failure_in(job: &Document) -> Option<Document> {
    let execution = job.get_document("last_execution").ok()?;
    let fields = ["class", "message", "trace"];
    Some(fields.iter().filter_map(|field| Some(((*field).to_owned(), execution.get(*field)?.clone()))).collect())
}
