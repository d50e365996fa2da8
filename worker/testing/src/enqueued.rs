//! Lists what the code under test has enqueued.

use recruiter_common::{
    Client, JobFilter, StateFilter, Workable,
    ids::JobId,
    job::Job,
    store::{Store, StoreError, Walk},
};

use recruiter_worker::solo::deserialize;

/// A waiting job with its workable.
#[derive(Clone, Debug)]
pub struct EnqueuedJob<W> {
    /// The parameters, decoded.
    pub workable: W,
    /// The job: its group, priority, tags and date.
    pub job: Job,
}

/// Why enqueued jobs cannot be listed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnqueuedError {
    /// MongoDB cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A job is not one of this class.
    #[error("the job {id} is not one of class `{class}`: {problem}")]
    Undecodable {
        /// The id of the job.
        id: JobId,
        /// The class.
        class: &'static str,
        /// The problem with its parameters.
        problem: String,
    },
}

/// The waiting jobs of a class, in the order of their ids, which is that of enqueueing by one process. Give an empty filter for all of them,
/// or restrict it by group, tag or urn. Bundles are left out.
///
/// ```no_run
/// use recruiter_testing::enqueued;
/// use recruiter_worker::{Client, Workable, common::JobFilter};
///
/// #[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
/// struct SendMail {
///     to: String,
/// }
///
/// impl Workable for SendMail {
///     const CLASS: &'static str = "SendMail";
///     type Output = ();
/// }
///
/// # async fn sign_up(client: &Client, name: &str) {}
/// # async fn example(client: &Client) -> Result<(), Box<dyn std::error::Error>> {
/// sign_up(client, "ada@example.org").await;
/// let mails = enqueued::<SendMail>(client, JobFilter::default().group("mail")).await?;
/// assert_eq!(mails.len(), 1);
/// assert_eq!(mails[0].workable.to, "ada@example.org");
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// When MongoDB cannot be used, or the parameters of a job are not those of the class.
pub async fn enqueued<W: Workable>(client: &Client, filter: JobFilter) -> Result<Vec<EnqueuedJob<W>>, EnqueuedError> {
    let store = Store::from(client.clone());
    let filter = filter.state(StateFilter::Waiting).class(W::CLASS);
    let (mut walk, mut all) = (Walk::new(filter), Vec::new());
    while let Some(found) = store.next_matches(&mut walk).await? {
        let ids: Vec<JobId> = found.iter().map(|found| found.job).collect();
        let mut stored = store.jobs_by_id(&ids).await?;
        for id in ids {
            let Some(stored) = stored.remove(&id) else { continue };
            let undecodable = |problem: String| EnqueuedError::Undecodable { id, class: W::CLASS, problem };
            let job = Job::try_from(stored.document).map_err(|(_, error)| undecodable(error.to_string()))?;
            if job.bundle.is_none() {
                let workable = deserialize(job.parameters.clone()).map_err(|failure| undecodable(failure.message))?;
                all.push(EnqueuedJob { workable, job });
            }
        }
    }
    Ok(all)
}
