#!/bin/bash
# What `ray up cluster.yaml` needs, once for each AWS account: a bucket, the group that says who may ssh, a role for the head,
# a role for workers, and the role that spot needs. The head may start workers, and end what carries the cluster's tag; a worker
# may use the bucket and nothing else. What is there already stays as it is, so the script may be run again.
#
#     BUCKET=my-heads REGION=us-west-2 SSH_FROM=203.0.113.7/32 bash deploy/aws-account.sh
#
# docs/guide/cluster.md has the commands after it.
set -euo pipefail
: "${BUCKET:?names the bucket}" "${REGION:?names the region}" "${SSH_FROM:?names who may ssh, as 203.0.113.7/32}"
CLUSTER=headcount                     # cluster_name of cluster.yaml

exists() { "$@" > /dev/null 2>&1; }

# us-east-1 is the only region that must not be named.
PLACE=()
[ "$REGION" = us-east-1 ] || PLACE=(--create-bucket-configuration "LocationConstraint=$REGION")
exists aws s3api head-bucket --bucket "$BUCKET" ||
  aws s3api create-bucket --bucket "$BUCKET" --region "$REGION" ${PLACE[@]+"${PLACE[@]}"}
aws s3api put-public-access-block --bucket "$BUCKET" --public-access-block-configuration \
  BlockPublicAcls=true,IgnorePublicAcls=true,BlockPublicPolicy=true,RestrictPublicBuckets=true
# Uploads that were begun and never finished cost as much as files, and no listing shows them.
aws s3api put-bucket-lifecycle-configuration --bucket "$BUCKET" --lifecycle-configuration '{"Rules": [{"ID": "unfinished uploads",
  "Status": "Enabled", "Filter": {"Prefix": ""}, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}}]}'

# Ray would open port 22 to the world in a group of its own. It takes this one, by its name, as it is.
VPC=$(aws ec2 describe-vpcs --region "$REGION" --filters Name=is-default,Values=true --query 'Vpcs[0].VpcId' --output text)
GROUP=$(aws ec2 describe-security-groups --region "$REGION" --query 'SecurityGroups[0].GroupId' --output text \
  --filters "Name=vpc-id,Values=$VPC" "Name=group-name,Values=$CLUSTER")
if [ "$GROUP" = None ]; then
  GROUP=$(aws ec2 create-security-group --region "$REGION" --vpc-id "$VPC" --group-name "$CLUSTER" \
    --description "headcount: machines reach each other, and named addresses ssh" --query GroupId --output text)
  aws ec2 authorize-security-group-ingress --region "$REGION" --group-id "$GROUP" --ip-permissions '[
    {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "'"$GROUP"'"}]},
    {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "'"$SSH_FROM"'"}]}]'
fi

ACCOUNT=$(aws sts get-caller-identity --query Account --output text)
TRUST='{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"},
  "Action": "sts:AssumeRole"}]}'
STORE='{"Version": "2012-10-17", "Statement": [
  {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": "arn:aws:s3:::'$BUCKET'"},
  {"Effect": "Allow", "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"],
   "Resource": "arn:aws:s3:::'$BUCKET'/*"}]}'
# A machine is started with the cluster's tag, and only what carries it can be ended or tagged anew.
OURS='"StringEquals": {"ec2:ResourceTag/ray-cluster-name": "'$CLUSTER'"}'
LAUNCH='{"Version": "2012-10-17", "Statement": [
  {"Effect": "Allow", "Action": ["ec2:DescribeInstances", "ssm:GetParameters"], "Resource": "*"},
  {"Effect": "Allow", "Action": "ec2:RunInstances", "Resource": "arn:aws:ec2:*:*:instance/*",
   "Condition": {"StringEquals": {"aws:RequestTag/ray-cluster-name": "'$CLUSTER'"}}},
  {"Effect": "Allow", "Action": "ec2:RunInstances", "NotResource": "arn:aws:ec2:*:*:instance/*"},
  {"Effect": "Allow", "Action": "ec2:CreateTags", "Resource": "*",
   "Condition": {"StringEquals": {"ec2:CreateAction": "RunInstances"}}},
  {"Effect": "Allow", "Action": ["ec2:CreateTags", "ec2:TerminateInstances"], "Resource": "arn:aws:ec2:*:*:instance/*",
   "Condition": {'$OURS'}},
  {"Effect": "Allow", "Action": "iam:PassRole", "Resource": "arn:aws:iam::'$ACCOUNT':role/headcount-worker",
   "Condition": {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}}]}'
for ROLE in headcount-head headcount-worker; do
  exists aws iam get-role --role-name $ROLE || aws iam create-role --role-name $ROLE --assume-role-policy-document "$TRUST"
  aws iam put-role-policy --role-name $ROLE --policy-name store --policy-document "$STORE"
  if ! exists aws iam get-instance-profile --instance-profile-name $ROLE; then
    aws iam create-instance-profile --instance-profile-name $ROLE
    aws iam add-role-to-instance-profile --instance-profile-name $ROLE --role-name $ROLE
  fi
done
aws iam put-role-policy --role-name headcount-head --policy-name launch --policy-document "$LAUNCH"
SPOT=$(aws iam list-roles --path-prefix /aws-service-role/spot.amazonaws.com/ --query 'Roles[0].RoleName' --output text)
[ "$SPOT" != None ] || aws iam create-service-linked-role --aws-service-name spot.amazonaws.com
