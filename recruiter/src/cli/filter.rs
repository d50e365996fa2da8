//! A filter of jobs that none has matched: its finish reason may be misspelt.

use std::io::Write;

use recruiter_common::{JobFilter, job::FinishReason};

use super::{exit::usage, output::printable};

/// Minimum similarity, from 0 to 1, of an unknown finish reason to a built-in one, to be treated as a misspelling of it.
const ALIKE: f64 = 0.8;

/// Called when no job matched: refuses a finish reason that looks misspelt, and warns about one that is not
/// built in.
pub(crate) fn check_reason(filter: &JobFilter) -> anyhow::Result<()> {
    let Some(why) = filter.why.as_deref().filter(|why| FinishReason::BUILT_IN.iter().all(|known| known.as_str() != *why)) else {
        return Ok(());
    };
    let known: Vec<&str> = FinishReason::BUILT_IN.iter().map(FinishReason::as_str).collect();
    let alike = |known: &&str| strsim::jaro_winkler(known, why);
    let nearest = known.iter().copied().max_by(|one, other| alike(one).total_cmp(&alike(other)));
    let (shown, known) = (printable(why, 80), known.join(", "));
    if let Some(nearest) = nearest.filter(|nearest| alike(nearest) > ALIKE) {
        return Err(usage(format!(
            "no archived job has the finish reason `{shown}`; did you mean `{nearest}`? The built-in finish reasons are {known}"
        )));
    }
    writeln!(std::io::stderr(), "`{shown}` is not a built-in finish reason ({known}); only a custom retry policy can set it")?;
    Ok(())
}
