//! What a limited job needs: its gate, the resources in it, and the permits for them ([`limits`](crate::limits)).

use std::collections::BTreeSet;

use crate::base::Instant;

/// Maximum length of a gate, in bytes.
pub const LONGEST_GATE: usize = 256;
/// Separates the resources in a gate.
pub(crate) const SEPARATOR: char = ',';
/// The first character in the gate of a line.
pub(crate) const LINE: char = '>';

/// The right to start a limited job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Permit {
    /// The gate of the job for which it was given.
    pub gate: Option<String>,
    /// One number of each resource with a capacity, for example `printer#0`. MongoDB refuses a second worker with the same one.
    pub names: Vec<String>,
    /// The job is assigned ahead. It gets the names of another job of its group and gate in the same worker, when that job returns.
    pub is_ahead: bool,
    /// A start under a rate is allowed in this interval of the server's clock.
    pub between: Option<(Instant, Instant)>,
}

impl Permit {
    /// Whether the limit of the group itself is among its resources.
    pub fn is_of_group(&self) -> bool {
        self.names.iter().any(|name| group_of_resource(name).is_some())
    }

    /// Whether this is a permit for a job of this group and gate: the job may have been replaced since.
    pub fn is_for(&self, group: &str, gate: Option<&str>) -> bool {
        let mut groups = self.names.iter().filter_map(|name| group_of_resource(resource_and_number(name)?.0));
        self.gate.as_deref() == gate && groups.all(|other| other == group)
    }
}

/// The name of the permit `number` of a resource.
pub fn permit_name(resource: &str, number: u32) -> String {
    format!("{resource}#{number}")
}

/// The resource and the number in the name of a permit.
pub fn resource_and_number(permit: &str) -> Option<(&str, u32)> {
    let (resource, number) = permit.rsplit_once('#')?;
    Some((resource, number.parse().ok()?))
}

/// The resource that stands for the limit of a group. No resource of a gate can have this name.
pub fn resource_of_group(group: &str) -> String {
    format!("@{group}")
}

/// The group whose limit a resource stands for.
pub fn group_of_resource(resource: &str) -> Option<&str> {
    resource.strip_prefix('@')
}

/// The gate of the jobs in a line. It is a resource of its own, with a capacity of one.
pub fn gate_of_line(key: &str) -> String {
    format!("{LINE}{key}")
}

/// The key of the line, if this is the gate of one.
pub fn line_of_gate(gate: &str) -> Option<&str> {
    gate.strip_prefix(LINE)
}

/// The resources in a gate.
pub fn resources_in(gate: &str) -> impl Iterator<Item = &str> {
    // A line is one resource. Its key may have separators.
    let (line, resources) = if line_of_gate(gate).is_some() { (Some(gate), "") } else { (None, gate) };
    line.into_iter().chain(resources.split(SEPARATOR).filter(|resource| !resource.is_empty()))
}

/// The gate of a job that needs these resources: sorted, each once.
pub fn gate_of<'a>(resources: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let sorted: BTreeSet<&str> = resources.into_iter().collect();
    (!sorted.is_empty()).then(|| sorted.into_iter().collect::<Vec<_>>().join(","))
}
