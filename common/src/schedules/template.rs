//! The job of a schedule in its stored form.

use bson::{Bson, Document, RawDocumentBuf, doc};

use super::{InvalidSchedule, fields::Fields};
use crate::{
    base::{Instant, of_bson},
    enqueue::{
        NewJob,
        spec::{JobSpec, UnknownPolicies},
    },
    job::{Settings, settings::IN_TEMPLATES},
    mongo::LARGEST_WORKABLE,
};

/// The fields of a template that are no settings.
const CONTENT: [&str; 3] = ["class", "parameters", "items"];

/// The template that a schedule stores: the content of its job, and all settings.
pub(crate) fn template_of(job: NewJob) -> Result<Document, InvalidSchedule> {
    let refused = |reason: String| InvalidSchedule::Job { reason };
    if !job.is_repeatable() {
        return Err(InvalidSchedule::NotRepeatable);
    }
    // A trace only if the job names one: that of the process that declares the schedule ends soon.
    let settings = job.settings().complete().map_err(|error| refused(of_bson(&error)))?;
    let (_, mut job) = job.into_document(Instant::UNIX_EPOCH).map_err(|error| refused(error.to_string()))?;
    let mut template = Document::new();
    if let Some(Bson::Document(workable)) = job.remove("workable") {
        template.extend(workable.into_iter().filter(|(field, _)| field != "method"));
    }
    template.extend(settings);
    match template.to_vec().map_err(|error| refused(error.to_string()))?.len() {
        bytes if bytes > LARGEST_WORKABLE => {
            Err(refused(format!("with its tags and its retry policy it has {bytes} bytes, and {LARGEST_WORKABLE} is the limit")))
        }
        _ => Ok(template),
    }
}

/// The job of a template. A field that this release does not know is refused: without it the job would be another one.
pub(crate) fn job_of(template: &Document) -> Result<NewJob, InvalidSchedule> {
    let refused = |reason: String| InvalidSchedule::Job { reason };
    let fields = Fields { document: template, within: "job." };
    let mut settings = template.clone();
    CONTENT.iter().for_each(|field| drop(settings.remove(field)));
    if let Some(field) = settings.keys().find(|field| !IN_TEMPLATES.contains_key(*field)) {
        return Err(refused(format!("this release does not know its field `{field}`")));
    }
    // PHP stores an empty document as an empty array.
    let document = |value: &Bson| {
        let is_empty_array = value.as_array().is_some_and(Vec::is_empty);
        if is_empty_array { Some(Document::new()) } else { value.as_document().cloned() }
    };
    let spec = JobSpec {
        class: fields.text("class")?.unwrap_or_default().to_owned(),
        parameters: fields.get("parameters", "a document", document)?,
        items: fields.get("items", "an array of documents", |value| value.as_array()?.iter().map(document).collect())?,
        settings: settings_of(&settings)?,
        ..JobSpec::default()
    };
    spec.into_job(UnknownPolicies::Accept).map_err(|problem| refused(problem.to_string()))
}

/// The settings in these fields. The error names the field.
fn settings_of(fields: &Document) -> Result<Settings, InvalidSchedule> {
    let read = |fields: &Document| RawDocumentBuf::try_from(fields).and_then(|fields| Settings::of_fields(&fields));
    let problem = |(field, value): (&String, &Bson)| {
        let error = read(&doc! { field: value.clone() }).err()?;
        Some(InvalidSchedule::Job { reason: format!("`job.{field}` is not valid: {}", of_bson(&error)) })
    };
    read(fields).map_err(|error| fields.iter().find_map(problem).unwrap_or_else(|| InvalidSchedule::Job { reason: of_bson(&error) }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::JobId;

    #[test]
    fn a_job_survives_being_stored() {
        let jobs = [NewJob::of_class("c", doc! { "a": 5_i64 }), NewJob::bundle_of_class("c", [doc! { "n": 1 }, doc! {}])];
        for job in jobs {
            let again = job_of(&template_of(job.clone()).expect("a template")).expect("a job");
            let id = JobId::new();
            let document = |job: NewJob| job.with_id(id).into_document(Instant::UNIX_EPOCH).expect("a job").1;
            assert_eq!(document(again), document(job));
        }
    }

    #[test]
    fn a_job_that_continues_another_is_not_repeated() {
        let continued = NewJob::of_class("c", doc! {}).continues(1, None);
        assert!(matches!(template_of(continued), Err(InvalidSchedule::NotRepeatable)));
    }
}
