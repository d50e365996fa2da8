//! The job of a schedule in its stored form.

use bson::{Bson, Document, doc};

use super::{
    InvalidSchedule,
    fields::{Fields, integer},
};
use crate::{
    enqueue::NewJob,
    instant::Instant,
    job::{Keep, Priority, StoredPolicy},
    limits::{line_of_gate, resources_in},
    spec::{JobSpec, UnknownPolicies},
    store::schema::LARGEST_WORKABLE,
};

/// Fields of a job that a template has as well.
const SHARED: [&str; 7] = ["group", "priority", "retry_policy", "tags", "urn", "keep", "halt_on_failure"];

/// The template that a schedule stores: all that a job has besides its id, its dates and its state.
pub(crate) fn template_of(job: NewJob) -> Result<Document, InvalidSchedule> {
    if !job.is_repeatable() {
        return Err(InvalidSchedule::NotRepeatable);
    }
    let (_, mut job) = job.into_document(Instant::UNIX_EPOCH).map_err(|error| InvalidSchedule::Job { reason: error.to_string() })?;
    let mut template = Document::new();
    if let Some(Bson::Document(workable)) = job.remove("workable") {
        template.extend(workable.into_iter().filter(|(field, _)| field != "method"));
    }
    if let Ok(gate) = job.get_str("gate") {
        match line_of_gate(gate) {
            Some(line) => _ = template.insert("line", line),
            None => _ = template.insert("limits", resources_in(gate).map(Bson::from).collect::<Vec<_>>()),
        }
    }
    template.extend(SHARED.into_iter().filter_map(|field| Some((field.to_owned(), job.remove(field)?))));
    let bytes = template.to_vec().map_err(|error| InvalidSchedule::Job { reason: error.to_string() })?.len();
    if bytes > LARGEST_WORKABLE {
        let reason = format!("with its tags and its retry policy it has {bytes} bytes, and {LARGEST_WORKABLE} is the limit");
        return Err(InvalidSchedule::Job { reason });
    }
    Ok(template)
}

/// The job of a template. A field that this release does not know is refused: without it the job would be another one.
pub(crate) fn job_of(template: &Document) -> Result<NewJob, InvalidSchedule> {
    let fields = Fields { document: template, within: "job." };
    let known = ["class", "parameters", "items", "limits", "line"];
    if let Some(field) = template.keys().find(|field| !known.contains(&field.as_str()) && !SHARED.contains(&field.as_str())) {
        return Err(InvalidSchedule::Job { reason: format!("this release does not know its field `{field}`") });
    }
    spec_of(&fields)?.into_job(UnknownPolicies::Accept).map_err(|problem| InvalidSchedule::Job { reason: problem.to_string() })
}

fn spec_of(fields: &Fields<'_>) -> Result<JobSpec, InvalidSchedule> {
    // PHP stores an empty document as an empty array.
    let document = |value: &Bson| {
        let is_empty_array = value.as_array().is_some_and(Vec::is_empty);
        if is_empty_array { Some(Document::new()) } else { value.as_document().cloned() }
    };
    let policy = |value: &Bson| {
        let policy = value.as_document()?;
        let parameters = policy.get("parameters").cloned().unwrap_or_else(|| doc! {}.into());
        Some(StoredPolicy { class: policy.get_str("class").ok()?.to_owned(), parameters })
    };
    let texts = |value: &Bson| value.as_array()?.iter().map(|text| text.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>();
    Ok(JobSpec {
        class: fields.text("class")?.unwrap_or_default().to_owned(),
        parameters: fields.get("parameters", "a document", document)?,
        items: fields.get("items", "an array of documents", |value| value.as_array()?.iter().map(document).collect())?,
        group: fields.text("group")?.map(str::to_owned),
        priority: fields.get("priority", "an integer from 0 to 9", |value| Priority::new(u8::try_from(integer(value)?).ok()?))?,
        limits: fields.get("limits", "an array of texts", texts)?.unwrap_or_default(),
        line: fields.text("line")?.map(str::to_owned),
        halt_on_failure: fields.get("halt_on_failure", "true or false", Bson::as_bool)?,
        tags: fields.get("tags", "an array of texts", texts)?.unwrap_or_default(),
        urn: fields.text("urn")?.map(str::to_owned),
        retry_policy: fields.get("retry_policy", "a document {class, parameters}", policy)?,
        keep: fields.text("keep")?.map(|keep| Keep::of_stored(Some(keep))),
        ..JobSpec::default()
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{ids::JobId, retry_policy::RetryForever};

    #[test]
    fn a_job_survives_being_stored() {
        let policy = RetryForever::new(Duration::from_secs(1)).expect("a policy");
        let jobs = [
            NewJob::of_class("c", doc! { "a": 5_i64 }),
            NewJob::bundle_of_class("c", [doc! { "n": 1 }, doc! {}]).keep(Keep::Failures).in_line("a").halt_on_failure(),
            NewJob::of_class("c", doc! {})
                .in_group("g")
                .priority(Priority::MAX)
                .limit("printer")
                .limit("customer:17")
                .tag("t")
                .urn("u")
                .retry(&policy),
        ];
        for job in jobs {
            let again = job_of(&template_of(job.clone()).expect("a template")).expect("a job");
            let id = JobId::new();
            let document = |job: NewJob| job.with_id(id).into_document(Instant::UNIX_EPOCH).expect("a job").1;
            assert_eq!(document(again), document(job));
        }
    }
}
