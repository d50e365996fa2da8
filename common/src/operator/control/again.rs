//! An archived job as a new one. Pure.

use bson::{Bson, Document};

use super::Revision;
use crate::{
    base::JobId,
    enqueue::{NewJob, spec::unique_again},
    job::{Job, has_lost_content},
};

/// The same job under a new id, with its unique key and its settings. So it stays in the trace of the enqueuer. A bundle gets only the items that are not done, or all items if all are done.
pub(crate) fn again(job: Job, with: &Revision) -> Result<NewJob, String> {
    if has_lost_content(&job) {
        return Err("MongoDB refused its document when it ended, so its parameters and settings are lost; enqueue it with them".to_owned());
    }
    let document = |parameters: Bson| {
        let Bson::Document(parameters) = parameters else {
            return Err("its parameters are not a document; enqueue it by hand".to_owned());
        };
        Ok(with.parameters(parameters))
    };
    let unique = unique_again(&job);
    let new = match &job.bundle {
        None => NewJob::of_class(job.class, document(job.parameters)?),
        Some(_) => {
            let items: Vec<Document> = job.items_to_repeat().into_iter().map(document).collect::<Result<_, _>>()?;
            NewJob::bundle_of_class(job.class, items)
        }
    };
    let new = new.with_settings(with.settings(&job.settings)).with_id(JobId::new()).recovered_from(job.id);
    Ok(match unique {
        Some(unique) => new.unique(unique),
        None => new,
    })
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    fn job(more: Document) -> Job {
        let mut document = doc! {
            "_id": bson::oid::ObjectId::from_bytes([7; 12]), "locked": false, "group": "g", "priority": 3, "why": "gave-up",
            "workable": { "class": "c", "parameters": { "a": 1 } }, "retry_policy": { "class": "Mine", "parameters": {} },
        };
        document.extend(more);
        Job::try_from(document).expect("a job")
    }

    /// It would run with no parameters, under no limit, and by another policy.
    #[test]
    fn a_job_that_has_lost_its_content_is_not_enqueued_again() {
        let of = |more: Document| again(job(more), &Revision::default());
        assert!(of(doc! { "reduced": "MongoDB refused the whole document" }).unwrap_err().contains("parameters"));
        assert!(of(doc! { "reduced": "MongoDB refused the whole history" }).is_ok(), "only its history is lost");
    }

    #[test]
    fn only_the_items_of_a_bundle_that_are_not_done_are_enqueued_again() {
        let bundle = |outcomes: Vec<Bson>| {
            let items: Vec<Document> = (0..3).map(|n| doc! { "n": n }).collect();
            job(doc! { "workable": { "class": "c", "items": items }, "item_outcomes": outcomes })
        };
        let failed = Bson::from(doc! { "class": "x", "message": "too hot", "why": "gave-up" });
        let done_again = |job: Job| format!("{:?}", again(job, &Revision::default()).expect("a bundle"));
        let rest = done_again(bundle(vec!["done".into(), failed]));
        assert!(!rest.contains("\"n\": Int32(0)") && rest.contains("\"n\": Int32(1)") && rest.contains("\"n\": Int32(2)"), "{rest}");
        assert!(done_again(bundle(vec!["done".into(); 3])).contains("\"n\": Int32(0)"), "all items, if all are done");
    }
}
