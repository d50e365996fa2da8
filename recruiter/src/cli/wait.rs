//! `recruiter jobs wait` and `recruiter enqueue --wait`: waits for the end of a job and writes its result.

use std::{io::Write, time::Duration};

use anyhow::anyhow;
use bson::{Bson, RawDocumentBuf};
use recruiter_common::{
    exit::Exit,
    ids::JobId,
    job::FinishReason,
    store::{Store, lossy},
    wait::WaitError,
};

use super::{
    output::{Format, printable},
    redaction::Reveal,
    view::document_line,
};
use crate::views::job::{End, last_of_chain};

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
                document_line(out, End::not_kept(id))?;
            } else {
                writeln!(std::io::stderr(), "{id} succeeded; nothing of it is kept")?;
            }
            Ok(())
        }
        Err(late @ WaitError::TimedOut { .. }) => Err(anyhow!(late).context(Exit::TimedOut)),
        Err(other) => Err(other.into()),
    }
}

fn write_end(id: JobId, stored: RawDocumentBuf, format: Format, out: &mut impl Write) -> anyhow::Result<()> {
    let end = End::of(id, &lossy(&stored));
    let is_done = end.why == FinishReason::DONE;
    if format.json {
        document_line(out, end.to_document())?;
    } else if is_done && end.result != Bson::Null {
        writeln!(out, "{}", end.result.into_relaxed_extjson())?;
    }
    out.flush()?;
    if is_done {
        return Ok(());
    }
    let text = |field: &str| end.failure.as_ref().and_then(|failure| failure.get_str(field).ok()).unwrap_or_default().to_owned();
    let (class, message) = (text("class"), text("message"));
    let said = if class.is_empty() { String::new() } else { format!(": {}: {}", printable(&class, 80), printable(&message, 400)) };
    Err(anyhow!("job {id} ended as `{}`{said}", printable(end.why.as_str(), 80)).context(Exit::JobFailed))
}
